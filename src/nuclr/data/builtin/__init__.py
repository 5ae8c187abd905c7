"""Built-in pairs with a known truth: small pictures of shapes, and captions that leave out details at random.

Reading order: `grammar` (the words of a caption and their probabilities), `scenes` (which scenes and captions are
drawn), `draw` (pictures of scenes), `truth` (the true popularity and false negatives), `pairs` (numbered samples).
"""

from nuclr.data.builtin.builtin_pairs import BuiltinLabeled, BuiltinPairs
from nuclr.data.builtin.truth import FLOOR, Grouped, Truth

__all__ = ["FLOOR", "BuiltinLabeled", "BuiltinPairs", "Grouped", "Truth"]
