"""The comparison of the data path with the training step: numbers in, numbers and lines out; nothing is timed."""

import math

import pytest

from nuclr.runs import launch
from nuclr.training.data_path import (
    DataRate,
    blend,
    bottleneck_warning,
    describe_rates,
    measure,
    seconds_per_step,
)

# 800 samples took 4 s and 8 CPU seconds with two workers: 200 per second, 100 per core.
SLOW = DataRate(samples=800, seconds=4.0, cpu_seconds=8.0, workers=2, cores=4)


def test_cores_are_the_rate_times_the_cpu_time_per_sample():
    assert (SLOW.per_second, SLOW.per_core, SLOW.busy) == (200, 100, 1)
    assert [SLOW.cores_for(rate) for rate in (1, 100, 101, 500, 2000)] == [1, 1, 2, 5, 20]


def test_workers_that_wait_for_storage_need_no_cores():
    waiting = DataRate(samples=800, seconds=16.0, cpu_seconds=8.0, workers=2, cores=4)
    assert waiting.busy == 0.25 and waiting.cores_for(500) == 5
    assert "The workers waited 75% of the time" in describe_rates(waiting, 1e6, "cuda")
    assert "waited" not in describe_rates(waiting, 10, "cuda"), "reading is fast enough, so there is nothing to do"
    assert "of the time" not in describe_rates(SLOW, 10, "cuda")


def test_more_workers_than_cores_are_not_counted_as_waiting():
    crowded = DataRate(samples=800, seconds=4.0, cpu_seconds=8.0, workers=16, cores=4, processes=2)
    assert crowded.busy == 1


@pytest.mark.parametrize("rate", [math.nextafter(200, 300), 1e4])
def test_a_slower_data_path_gives_a_warning(rate):
    assert SLOW.is_slower_than(rate) and bottleneck_warning(SLOW, rate) is not None
    assert "the data path is the bottleneck" in describe_rates(SLOW, rate, "cuda")


@pytest.mark.parametrize("rate", [1, 199, 200])
def test_a_data_path_that_keeps_up_gives_none(rate):
    assert not SLOW.is_slower_than(rate) and bottleneck_warning(SLOW, rate) is None
    assert "the step is the bottleneck" in describe_rates(SLOW, rate, "cuda")


def test_the_warning_names_the_setting_and_the_cores():
    assert bottleneck_warning(SLOW, 350) == (
        "the data path is the bottleneck: it gives 200 of 350 samples/s that the step takes with data.workers=2.\n"
        "Set data.workers=4; this machine has 4 cores."
    )
    assert bottleneck_warning(SLOW, 2000).splitlines()[1] == (
        "It needs 20 cores and data.workers=20; this machine has 4 cores."
    )
    two = DataRate(samples=800, seconds=4.0, cpu_seconds=8.0, workers=2, cores=4, processes=2)
    assert bottleneck_warning(two, 350).splitlines()[1] == (
        "It needs 8 cores and data.workers=4; this machine has 4 cores for 2 processes."
    )


def test_enough_workers_on_too_few_cores_need_only_cores():
    crowded = DataRate(samples=800, seconds=2.0, cpu_seconds=8.0, workers=16, cores=4)
    assert bottleneck_warning(crowded, 900).splitlines()[1] == "It needs 9 cores; this machine has 4 cores."


def test_enough_workers_and_cores_that_wait_are_reported_as_waiting():
    waiting = DataRate(samples=800, seconds=8.0, cpu_seconds=8.0, workers=16, cores=4)
    assert "waited 75% of the time" in bottleneck_warning(waiting, 150)


def test_a_given_rate_takes_the_place_of_the_measured_step():
    assert bottleneck_warning(SLOW, step_rate=1e6, rate=150) is None
    assert "200 of 1,000 samples/s (--rate)" in bottleneck_warning(SLOW, step_rate=1, rate=1000)
    lines = describe_rates(SLOW, 50, "cpu", rate=1000).splitlines()
    assert lines == [
        "data path: 200 samples/s with data.workers=2 on 4 cores, 100 per core",
        "training step: 50 samples/s on cpu; the step is the bottleneck. "
        "Reading for it needs 1 core and data.workers=1",
        "reading 1,000 samples/s (--rate) needs 10 cores and data.workers=10",
    ]


def test_without_decoding_workers_are_not_advised():
    vectors = DataRate(samples=800, seconds=4.0, cpu_seconds=4.0, workers=0, cores=4)
    text = describe_rates(vectors, 500, "cuda", rate=1000) + bottleneck_warning(vectors, 500)
    assert "main thread" in text and "data.workers=" not in text
    assert seconds_per_step(100, vectors, step=1.0, step_cpu=0.0, on_cpu=False) == 1.5  # one after the other


def test_seconds_per_step_is_the_slower_of_both():
    assert seconds_per_step(100, SLOW, step=0.1, step_cpu=0.1, on_cpu=False) == 0.5
    assert seconds_per_step(100, SLOW, step=2.0, step_cpu=9.0, on_cpu=False) == 2.0
    # On the CPU both share four cores: 9 + 1 CPU seconds.
    assert seconds_per_step(100, SLOW, step=2.0, step_cpu=9.0, on_cpu=True) == 2.5


def test_samples_in_memory_cost_less():
    kept = DataRate(samples=800, seconds=1.0, cpu_seconds=2.0, workers=2, cores=4)
    assert blend(SLOW, kept, 0.0) == SLOW and blend(SLOW, kept, 1.0) == kept
    assert blend(SLOW, kept, 0.5).per_second == 800 / 2.5


def test_all_batches_are_counted():
    rate = measure(iter([range(3), range(4), range(1)]), workers=2, processes=3)
    assert (rate.samples, rate.workers, rate.processes) == (8, 2, 3) and rate.seconds > 0 and rate.cpu_seconds > 0


@pytest.mark.parametrize(
    ("content", "expected"),
    [("150000 100000", 2), ("max 100000", 8), ("", 8), ("10000 100000", 1), ("1600000 100000", 8)],
)
def test_cores_respect_the_quota_of_a_container(tmp_path, monkeypatch, content, expected):
    (tmp_path / "cpu.max").write_text(content)
    monkeypatch.setattr(launch, "CPU_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(launch.os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert launch.cpu_cores() == expected
