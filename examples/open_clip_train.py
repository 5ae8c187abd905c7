"""Train with open_clip's own program and an objective of nuclr as its loss; the arguments are open_clip's.

    python examples/open_clip_train.py --model ViT-B-32 --train-data pairs.tsv --dataset-type csv --batch-size 64
    torchrun --nproc_per_node 2 examples/open_clip_train.py --model ViT-B-32 --train-data pairs.tsv ...

pairs.tsv has the columns "filepath" and "title", separated by tabs. Only the two lines marked "nuclr" differ from
``python -m open_clip_train.main``. With --name and --resume latest, a run that was killed resumes from its last
checkpoint, with the state of the objective.
"""

import sys

import open_clip_train.main as training

from nuclr.integrations.open_clip import TrainOneEpoch  # nuclr

if __name__ == "__main__":
    training.train_one_epoch = TrainOneEpoch("nuclr", temperature=0.05)  # nuclr
    training.main(sys.argv[1:])
