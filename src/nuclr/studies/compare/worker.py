"""A process that trains one cell after another: `python -m nuclr.studies.compare.worker`.

Jobs come as lines of JSON on stdin, answers go as lines to stdout. Where stdin ends, whoever sent the jobs is gone, be
it by SIGKILL, and the process ends at once; what it was training goes on from its checkpoint another time.
"""

import json
import os
import queue
import sys
import threading
import traceback
from pathlib import Path
from typing import Any, TextIO

from nuclr.errors import UserError


def main() -> None:
    """Work until stdin ends."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    answers = sys.stdout
    sys.stdout = sys.stderr  # what anybody prints must not get among the answers
    jobs: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(sys.stdin, jobs), daemon=True).start()

    from nuclr.studies.compare import jobs as kinds
    from nuclr.training.loop import TrainingFailed
    from nuclr.training.signals import Interrupted

    shared: kinds.Shared = {}
    while True:
        job = jobs.get()
        try:
            kinds.run(job, shared)
            error = None
        except (UserError, TrainingFailed) as failed:
            error = str(failed)
        except (Interrupted, KeyboardInterrupt):
            os._exit(130)
        except Exception as failed:
            traceback.print_exc()
            error = f"{type(failed).__name__}: {failed}"
        answers.write(json.dumps({"cell": Path(job["cell"]).name, "error": error}) + "\n")
        answers.flush()


def _listen(lines: TextIO, jobs: "queue.SimpleQueue[dict[str, Any]]") -> None:
    for line in lines:
        jobs.put(json.loads(line))
    os._exit(1)


if __name__ == "__main__":
    main()
