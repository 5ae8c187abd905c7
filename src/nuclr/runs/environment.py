"""What a run was started with: the command, versions, the machine. Written once, when it begins."""

import json
import os
import platform
import shlex
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

ENVIRONMENT = "environment.json"
PACKAGES = ("nuclr", "torch", "transformers", "tokenizers", "kornia", "numpy", "pillow")


def environment() -> dict[str, Any]:
    """The command line as one would type it, versions of what results depend on, and the machine."""
    return {"command": _command(sys.argv), "versions": versions(), "machine": machine()}


def versions() -> dict[str, str]:
    """Python's and those of the packages that are installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, Any]:
    """System, processors, threads, accelerator."""
    found: dict[str, Any] = {
        "system": f"{platform.system()} {platform.machine()}",
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def write(folder: Path) -> None:
    """Leave environment.json in the folder, unless the run that is gone on with has left one."""
    path = folder / ENVIRONMENT
    if not path.exists():
        path.write_text(json.dumps(environment(), indent=1) + "\n", encoding="utf-8")


def _command(arguments: list[str]) -> str:
    program = Path(arguments[0]).name
    return shlex.join(["nuclr" if program in ("nuclr", "__main__.py") else program, *arguments[1:]])
