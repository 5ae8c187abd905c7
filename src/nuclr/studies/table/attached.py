"""Run a command that ends when its parent does: `python -m nuclr.studies.table.attached COMMAND...`.

The parent holds the other end of stdin. When it closes, because the parent wants it or is gone (even by SIGKILL), the
command's process group gets SIGTERM, so that a training writes a checkpoint, and SIGKILL if it does not end in time.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading

# This module imports neither torch nor numpy: it must listen to its stdin at once.

STOP_SECONDS = 60.0


def main() -> None:
    """Run the command of the arguments and exit with its status, 128 plus the signal if a signal ended it."""
    process = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True)
    threading.Thread(target=_end_with_stdin, args=(process,), daemon=True).start()
    status = process.wait()
    sys.stdout.flush()
    os._exit(status if status >= 0 else 128 - status)


def _end_with_stdin(process: "subprocess.Popen[bytes]") -> None:
    sys.stdin.buffer.read()
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
            return


if __name__ == "__main__":
    main()
