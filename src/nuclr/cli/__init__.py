"""The command line: `app` and one file per command. Heavy imports happen inside the commands, so --help is quick."""

from nuclr.cli.app import main

__all__ = ["main"]
