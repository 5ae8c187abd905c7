"""Training: pairs -> batches -> features -> objective, without ever losing work.

Read `loop` first: it is a run from beginning to end. Its parts: `step` (one step), `schedules` (everything that changes
over time), `build` (model, objective, optimizer), `validation`, `logging` (metrics, progress, TensorBoard, W&B),
`guards` (signals, NaN, changed data). `dry_run` is `nuclr train --dry-run`; it also compares the
rates of reading and of training.
"""
