"""What tables, pages and messages call the items of each side: "images" and "captions", "en texts" and "de texts"."""

from dataclasses import dataclass

from nuclr.data.pairs import Pairs

# Columns of popularity.csv and of the gallery's download; a column of texts never has one of these names.
RESERVED = frozenset(
    ("side", "group", "number", "name", "zeta", "zeta_rank", "popularity", "rank", "of", "copies", "truth")
) | {"truth_rank", "x", "y"}


@dataclass(frozen=True)
class SideWords:
    """The words for the items of one side.

    Attributes:
        name: name of the side, as in the names of metrics: "image", "en".
        kind: modality of its items: "image", "text", "vector", ...; "item" if it is not known.
        one: one item: "image", "caption", "en text".
        many: several items: "images", "captions", "en texts".
        column: title of the column that holds the items' texts or file names.

    """

    name: str
    kind: str
    one: str
    many: str
    column: str

    @property
    def a(self) -> str:
        """One item with its article: "an image", "a caption"."""
        return f"{'an' if self.one[:1].lower() in 'aeiou' else 'a'} {self.one}"

    @property
    def title(self) -> str:
        """Several items at the beginning of a heading. Names that users chose keep their case."""
        return self.many.capitalize() if self.name in ("image", "text", self.kind) else self.many


def name_sides(x_name: str, x_kind: str, y_name: str, y_kind: str, views: bool = False) -> tuple[SideWords, SideWords]:
    """Return the words for both sides.

    Args:
        x_name: name of side x.
        x_kind: its modality.
        y_name: name of side y.
        y_kind: its modality.
        views: True if both sides are views of the same items, which then have one name.

    Example:
        >>> [words.many for words in name_sides("image", "image", "text", "text")]
        ['images', 'captions']
        >>> [words.many for words in name_sides("en", "text", "de", "text")]
        ['en texts', 'de texts']

    """
    if views:
        return _words(x_kind, x_kind), _words(y_kind, y_kind)
    with_image = "image" in (x_name, y_name)
    return _words(x_name, x_kind, with_image), _words(y_name, y_kind, with_image)


def _words(name: str, kind: str, with_image: bool = False) -> SideWords:
    if name == "text" and with_image:
        return SideWords(name, kind, "caption", "captions", "caption")
    if name == "image":
        return SideWords(name, kind, "image", "images", "image")
    one = name if name == kind else f"{name} {kind}"
    return SideWords(name, kind, one, one if one.endswith("s") else f"{one}s", one if name in RESERVED else name)


def words_of_pairs(pairs: Pairs) -> tuple[SideWords, SideWords]:
    """Return the words for both sides of a source of pairs."""
    return name_sides(pairs.x_name, pairs.x_kind, pairs.y_name, pairs.y_kind, pairs.views)


def direction(name: str, other: str) -> str:
    """Return the name of a direction: "image to text", "en to de"."""
    return f"{name} to {other}"


def heading(text: str) -> str:
    """Return a direction as a heading: "Image to text". Names that users chose keep their case."""
    return text.capitalize() if text.split(" to ")[0] in ("image", "text") else text
