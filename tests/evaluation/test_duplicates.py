"""Copies of a caption, counted as hits: against sets."""

import pytest
import torch

from nuclr.evaluation import retrieval, with_copies


@pytest.mark.parametrize("seed", range(5))
def test_against_sets(seed):
    generator = torch.Generator().manual_seed(seed)
    pairs = torch.stack([torch.randint(6, (20,), generator=generator), torch.randperm(20, generator=generator)], 1)
    y_id = 10 * torch.randint(7, (20,), generator=generator)
    wanted = {(x, other) for x, y in pairs.tolist() for other in range(20) if y_id[other] == y_id[y]}
    found = with_copies(pairs, y_id).tolist()
    assert len(found) == len(wanted)
    assert {tuple(link) for link in found} == wanted


def test_a_copy_is_a_hit_in_both_directions():
    x = torch.eye(3)
    y = torch.tensor([[0.0, 1, 0], [1.0, 0, 0], [0, 0, 1]])  # captions 0 and 1 say the same, each of the other's image
    pairs = torch.arange(3)[:, None].expand(3, 2)
    assert retrieval(x, y, pairs)["mean_R@1"] == pytest.approx(1 / 3)
    assert retrieval(x, y, with_copies(pairs, torch.tensor([5, 5, 6])))["mean_R@1"] == 1
    assert torch.equal(with_copies(pairs, torch.arange(3)), pairs)
