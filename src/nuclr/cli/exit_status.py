"""Exit statuses of commands that train: interrupted, failed, or failed on another process."""

import contextlib
import sys
from collections.abc import Iterator


class Stopped(Exception):  # noqa: N818 (not an error in the program)
    """A command that ended early, with the exit status for the shell."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@contextlib.contextmanager
def training_errors() -> Iterator[None]:
    """Turn an interrupted or failed run into `Stopped`."""
    from nuclr.runs import launch
    from nuclr.training import guards

    try:
        yield
    except guards.Interrupted as stop:
        raise Stopped(f"{stop}; resume with --resume", stop.status) from None
    except guards.TrainingFailed as failed:
        raise Stopped(str(failed), 1) from None
    except launch.ElsewhereError:
        sys.exit(2)  # the first process reports the reason
