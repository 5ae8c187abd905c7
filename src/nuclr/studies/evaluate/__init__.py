"""`nuclr evaluate`.

Modules: `tasks` (test sets), `subject` (the model and its features), `corrector` (popularity-corrected ranking),
`protocol` (metrics and tables).
"""
