"""Logs of a run."""

from nuclr.report.training_run import curve, read_lines


def test_a_line_cut_by_a_kill_is_left_out(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "epoch": 0.5, "train/loss": 2}\n{"step": 2, "epo')
    notes = []
    lines = read_lines(tmp_path / "metrics.jsonl", notes)
    assert curve(lines, "train/loss") == ([0.5], [2.0])
    assert notes == ["metrics.jsonl: 1 lines could not be read and were left out."]
