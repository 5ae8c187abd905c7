"""`nuclr evaluate`: a trained model on test sets, by a protocol that is written down with the numbers.

`subject` (what is evaluated), `sets` (a name or path -> a test set), `features`, `correct` (plain beside corrected),
`evaluate` (all of it, and the file), `table` (for people).
"""
