"""The report: the folder of a run -> plain data -> one self-contained page.

In order: `logs` (what the folder says), `sample` (some pairs with their features), `examples`, `confusion`, `gallery`,
`popularity`, `duplicates` (what can be seen in them), `charts` (numbers -> SVG), `training` (all of it for one run),
`page` (plain data -> HTML), `write` (which page a folder gets).
"""
