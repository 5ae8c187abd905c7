"""Entry point of the command line: ``nuclr`` and ``python -m nuclr``."""

import sys

from nuclr.errors import EXTRAS, missing_extra


def main() -> None:
    """Run the command line; if an optional package is missing, say which extra installs it and exit with status 2."""
    try:
        from nuclr.cli.app import main as run

        run()
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        sys.stderr.write(f"nuclr: {missing_extra(package)}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
