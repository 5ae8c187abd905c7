"""Built-in pairs with known truth: small pictures of shapes, and captions that leave details out at random.

In order: `grammar` (what a caption says of a scene, and with which probability), `scenes` (which scenes there are),
`draw` (their pictures), `truth` (what follows for popularity and false negatives), `pairs` (numbered samples).
"""

from nuclr.data.builtin.pairs import BuiltinLabeled, BuiltinPairs
from nuclr.data.builtin.truth import FLOOR, Grouped, Truth

__all__ = ["FLOOR", "BuiltinLabeled", "BuiltinPairs", "Grouped", "Truth"]
