"""`nuclr evaluate`: `tasks` (test sets), `subject` (the model and its features), `protocol` (metrics and tables)."""
