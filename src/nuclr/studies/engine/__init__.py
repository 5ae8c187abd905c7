"""The study engine: many runs from one plan, each measured on the same sets, as one table.

`plan` says which runs a study needs and trains those that are missing, `measure` is the work on one run, `results`
computes values, differences and intervals from the stored outcomes, and `tables` writes them. `nuclr compare`,
`nuclr table` and `nuclr demo` are presets of it.
"""
