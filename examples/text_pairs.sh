#!/bin/sh
# Train on pairs of texts, search with the result, and see which answers are hubs: sh examples/text_pairs.sh [FOLDER]
set -e && cd "${1:-.}"
for n in $(seq 1 40); do for d in 2 3 5 7; do echo "what is $n times $d?,it is $((n * d)): $n times $d"; done; done > all.csv
(echo question,answer && awk 'NR % 7' all.csv) > pairs.csv && (echo question,answer && awk 'NR % 7 == 0' all.csv) > held_out.csv
nuclr train data.train=pairs.csv data.val=held_out.csv model.x.encoder=bag_of_words data.batch_size=32 schedule.epochs=3 out=run
nuclr embed run --pairs held_out.csv --out held_out.npz
nuclr evaluate run --correct bank=train
nuclr popularity run
