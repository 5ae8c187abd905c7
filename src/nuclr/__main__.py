"""`python -m nuclr` is `nuclr`."""

from nuclr.cli.app import main

main()
