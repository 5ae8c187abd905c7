"""Built-in pairs: small pictures of shapes, and captions that leave out details at random.

Reading order: `grammar` (the words of a caption and their probabilities), `scenes` (which scenes and captions are
drawn), `draw` (pictures of scenes), `builtin_pairs` (numbered samples).
"""

from nuclr.data.builtin.builtin_pairs import BuiltinLabeled, BuiltinPairs

__all__ = ["BuiltinLabeled", "BuiltinPairs"]
