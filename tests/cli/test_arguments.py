"""Settings and options on the command line: messages name what the command takes."""

import pytest

from nuclr.cli.arguments import options_in_messages
from nuclr.errors import UserError


def test_messages_about_pairs_name_options_instead_of_settings():
    with pytest.raises(UserError) as caught, options_in_messages():
        raise UserError("set data.root; no split 'a' (data.split); data.allow_outside=true, data.roots, data.x.key")
    assert str(caught.value) == "set --root; no split 'a' (--split); --allow-outside, data.roots, data.x.key"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--seeds", 3), "seeds=VALUE"),
        (("--lr", "seed=1"), "optimizer.lr=VALUE"),
        (("--ablation",), "--ablations"),
        (("pairs.csv", "methods=clip"), "data.train=pairs.csv"),
        ((".",), "config.yaml"),
    ],
)
def test_compare_explains_its_arguments(nuclr, tmp_path, monkeypatch, arguments, named):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").touch()
    ended = nuclr("compare", *arguments)
    assert ended.status == 2
    assert named in ended.err and len(ended.err.splitlines()) == 1
