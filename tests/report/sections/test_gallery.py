"""The gallery: which samples it shows, and their numbers."""

import json
from dataclasses import replace

import numpy as np
import pytest

from nuclr.report.sections.gallery import Face, Gallery, GallerySide, choose_cards, make_cards, popularity_charts
from nuclr.runs.side_words import name_sides

IMAGES, CAPTIONS = name_sides("image", "image", "text", "text")
POPULARITY = np.arange(1.0, 101)[::-1] / 50.5


@pytest.fixture
def side():
    return GallerySide(CAPTIONS, np.arange(100), POPULARITY, np.ones(100), 7, 0.0, True, truth=POPULARITY)


def test_gallery_shows_both_ends_and_the_middle():
    chosen = choose_cards(POPULARITY, 10)
    assert [row for row, group in chosen if group == "most"] == [0, 1, 2, 3]
    assert [row for row, group in chosen if group == "least"] == [96, 97, 98, 99]
    assert [row for row, group in chosen if group == "middle"] == [49, 50]
    assert len(choose_cards(POPULARITY[:5], 30)) == 5


def test_cards_have_ranks_and_positions(side):
    cards = make_cards(side, 10, lambda k: Face(f"caption {k}", labels={"caption": f"caption {k}"}))
    assert cards[0].rank == 1 and cards[-1].rank == 100 and cards[0].truth_rank == 1
    assert (cards[0].position, cards[-1].position) == (1, 0)
    data = Gallery([side], cards).data()
    assert json.loads(json.dumps(data))[0]["caption"] == "caption 0"
    gallery = Gallery([side], cards)
    assert (gallery.text_columns, gallery.hint) == (["caption"], "words of a caption")
    assert "truth" in data[0] and "zeta" not in data[0] and "picture" not in data[0]


def test_statistics_of_a_side(side):
    assert side.correlation(-POPULARITY) == pytest.approx(-1)
    assert 1 < side.effective_number() < 100
    assert side.top_share(0.5) == pytest.approx(POPULARITY[:50].sum() / 101 * 50.5 / 50)
    assert [chart.title for chart in popularity_charts(side)] == ["Popularity of the captions"]


def test_cards_at_both_ends_of_zeta_are_added_and_compared(side):
    zeta = np.roll(POPULARITY, 50)  # the largest zeta is that of sample 50
    learned = replace(side, zeta=zeta)
    cards = make_cards(learned, 20, lambda k: Face(f"caption {k}"))
    groups = {card.number: card.group for card in cards}
    assert groups[0] == "most" and groups[50] == "middle zeta-most" and groups[49] == "middle zeta-least"
    assert groups[55] == "zeta-most" and len(cards) == len(groups)
    [compared] = Gallery([learned], cards).by_zeta
    assert compared.correlation == pytest.approx(learned.correlation(zeta))
    (most, exact, by_zeta, both), (least, rarest, by_small_zeta, _) = compared.ends
    assert (most, least, both) == ("Most popular", "Least popular", 0)
    assert [card.number for card in exact] == [0, 1, 2, 3, 4, 5]
    assert [card.number for card in by_zeta] == [50, 51, 52, 53, 54, 55]
    assert [card.number for card in rarest] == [99, 98, 97, 96, 95, 94]
    assert [card.number for card in by_small_zeta] == [49, 48, 47, 46, 45, 44]


def test_without_a_learned_zeta_nothing_is_compared(side):
    for zeta in (None, np.zeros(100)):
        unlearned = replace(side, zeta=zeta)
        assert Gallery([unlearned], make_cards(unlearned, 10, lambda k: Face(str(k)))).by_zeta == []
