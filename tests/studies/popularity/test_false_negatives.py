"""Likely false negatives of embeddings whose pairs have groups."""

import numpy as np
import torch

from nuclr.data.formats.embeddings import Embeddings
from nuclr.runs.side_words import name_sides
from nuclr.studies.popularity.inputs import Names
from nuclr.studies.popularity.popularity_files import likely_false_negatives
from nuclr.studies.popularity.sides import solve_sides, weigh_pairs


def test_right_answers_of_the_same_group_are_not_false_negatives():
    """Pairs 0 and 1 form a group. x 0 is closest to y 1, which is right, and x 2 to y 3, which belongs to x 3."""
    x = torch.eye(4, dtype=torch.float64)
    y = torch.tensor([[0.6, 0.8, 0, 0], [0.8, 0.6, 0, 0], [0, 0, 0.6, 0.8], [0, 0, 0.8, 0.6]], dtype=torch.float64)
    pairs = weigh_pairs(Embeddings(x=x, y=y, y_to_x=torch.arange(4)), "pairs", "none")
    side = solve_sides(pairs, 0.2)["y"]
    words = dict(zip("xy", name_sides("en", "text", "de", "text"), strict=True))

    def found(group: np.ndarray | None) -> set[tuple[int, int]]:
        names = Names(words, {"x": [], "y": []}, [0, 1, 2, 3], group=group)
        return {(row["x"], row["y"]) for row in likely_false_negatives(pairs, side, names)["rows"]}

    assert found(None) == {(0, 1), (1, 0), (2, 3), (3, 2)}
    assert found(np.array([0, 0, 1, 2])) == {(2, 3), (3, 2)}
