"""A shared encoder under DistributedDataParallel: two processes take the steps that one takes."""

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from nuclr import distributed
from nuclr.models import EncoderSide, build_model
from nuclr.objectives import build
from tests import forks, process_group
from tests.models.conftest import CAPTIONS


def take_steps(encoder: str, world: str, out: str) -> None:
    """Train in this process, one of `world`, and save the weights."""
    torch.set_num_threads(1)
    if int(world) == 1:
        train_and_save(encoder, 1, out)
    else:
        torch.distributed.init_process_group("gloo")
        train_and_save(encoder, int(world), out)
        process_group.leave()


def train_and_save(encoder: str, world: int, out: str) -> None:
    torch.manual_seed(0)
    texts = [f"{text} {number}" for number in range(4) for text in CAPTIONS]
    items = texts if encoder != "tiny_resnet" else torch.randint(0, 256, (12, 3, 16, 16), dtype=torch.uint8)
    options = {"image_size": 16} if encoder == "tiny_resnet" else {"texts": texts}
    model = build_model(EncoderSide(encoder, **options), shared=True, width=8)
    wrapped = DistributedDataParallel(model) if world > 1 else model
    objective = build("clip", num_samples=12)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    own = slice(distributed.rank() * 12 // world, (distributed.rank() + 1) * 12 // world)
    for _ in range(3):
        x, y = model.prepare_x(items[own]), model.prepare_y(items[own])
        y = y.flip(-1) if torch.is_tensor(y) else y | {"input_ids": y["input_ids"].roll(1, 1)}
        optimizer.zero_grad()
        objective(*wrapped(x, y), torch.arange(12)[own]).loss.backward()
        optimizer.step()
    torch.save(model.state_dict(), f"{out}/{distributed.rank()}.pt")


@pytest.mark.slow
@pytest.mark.parametrize("encoder", ["bag_of_words", "tiny_text", "tiny_resnet"])
def test_two_processes_equal_one(encoder, tmp_path):
    states = {}
    for world in (1, 2):
        folder = tmp_path / str(world)
        folder.mkdir()
        forks.call(take_steps, [encoder, world, folder], world)
        states[world] = [torch.load(folder / f"{rank}.pt") for rank in range(world)]
    (one,), (first, second) = states[1], states[2]
    assert one.keys() == first.keys() and all(key.startswith("x.") for key in one)
    for key, value in one.items():
        assert torch.equal(first[key], second[key]), key
        torch.testing.assert_close(first[key], value, atol=1e-5, rtol=1e-4, msg=key)
