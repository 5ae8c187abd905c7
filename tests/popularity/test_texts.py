"""Beginnings of texts that stand for queries."""

import warnings

import pytest

from nuclr.popularity import pseudo_queries


def test_beginnings_and_their_texts():
    texts = [
        "## How to prune\n\nCut in winter. Not in spring.",
        "  Does it rain? It does not, and nobody knows why.",
        "这是第一句话它也足够长。这是第二句话。",
        "One sentence that is the whole text.",
        "Notes\nShort headings say nothing.",
        "",
        "tar cf {{target.tar}} {{file1}}",
        "Version 1.5 is out. It has no bugs.",
        "A line without a period\nand another one that is longer",
    ]
    queries, answers = pseudo_queries(texts)
    assert answers == [0, 1, 2, 7, 8]
    assert queries[:3] == ["How to prune", "Does it rain?", "这是第一句话它也足够长。"]
    assert queries[3:] == ["Version 1.5 is out.", "A line without a period"]


def test_texts_that_are_not_prose():
    commands = ["ls -l {{path}}", "git push --force", "systemctl restart sshd"]
    with pytest.warns(UserWarning, match="1 of 4 .*real ones"):
        assert pseudo_queries([*commands, "Lists all files. Then it stops."])[1] == [3]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pseudo_queries([]) == ([], [])
