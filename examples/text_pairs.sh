#!/bin/sh
# Train on pairs of texts, search with the result, and see which answers are hubs. Runs in a minute on a CPU.
#   sh examples/text_pairs.sh [FOLDER]
set -e
cd "${1:-.}"
printf 'question,answer\n' > pairs.csv
for n in $(seq 1 40); do for d in 2 3 5 7; do echo "what is $n times $d?,it is $((n * d)): $n times $d"; done; done >> pairs.csv
head -n 1 pairs.csv > held_out.csv && awk 'NR % 8 == 0' pairs.csv >> held_out.csv
nuclr train data.train=pairs.csv data.val=held_out.csv model.x.encoder=bag_of_words schedule.epochs=3 out=run
nuclr embed run --pairs held_out.csv --out held_out.npz
nuclr evaluate run
nuclr popularity run
