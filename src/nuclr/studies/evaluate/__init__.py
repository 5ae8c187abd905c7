"""`nuclr evaluate`: a trained model on test sets.

`tasks` opens the model and the test sets and computes features, `study` measures and has the typed result.
"""
