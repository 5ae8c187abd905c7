"""`python -m nuclr` is `nuclr`."""

from nuclr.cli import main

main()
