"""The demo, `nuclr train` without arguments: three promises of this package, shown on built-in pairs in two minutes.

`study` trains the runs and collects their results, `worker` trains and measures one of them, `text` is what is printed.
"""
