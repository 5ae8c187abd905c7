"""Training: pairs -> batches -> features -> objective, and never losing work.

A newcomer's way through: `settings` (all that can be set), `loop` (a run from beginning to end), and what it is made
of: `parts` (data, model, objective from settings), `schedules` (the only owner of time), `optimizer`, `features`,
`validate`, `checkpoint`, `folder` (a run on disk), `signals`, `progress`. `demo` is what `nuclr train` does by itself.
"""
