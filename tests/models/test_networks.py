"""The image model of colors and edges."""

import torch

from nuclr.models.networks import GAIN, NOISE, Edges, EdgesConfig


def test_an_edge_is_found_where_it_is_and_in_its_direction():
    """Brightness rises from 0 to 1 in the middle of a cell, from left to right: direction 0, response 1/2."""
    pixels = torch.zeros(1, 3, 8, 8)
    pixels[..., 3:] = 1.0
    with torch.no_grad():
        cells = Edges(EdgesConfig(cells=4, directions=4))(pixel_values=pixels).last_hidden_state[0]
    assert cells.shape == (3 + 4, 4, 4)
    assert torch.equal(cells[0, 1], torch.tensor([0.0, 0.5, 1.0, 1.0]))
    rising, _, falling, _ = cells[3:, 1]  # a row of cells away from the border
    assert torch.allclose(rising[1], torch.tensor(GAIN * (0.5 - NOISE)))
    assert falling[1] == 0
    assert rising[2] == falling[2] == 0
