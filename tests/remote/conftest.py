import pytest

from nuclr.remote import transfer
from tests.remote import server


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache of its own for every test, and short waits between attempts."""
    monkeypatch.setenv("NUCLR_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("NUCLR_CACHE_SIZE", raising=False)
    monkeypatch.setattr(transfer, "WAITS", (0.01, 0.02, 0.03, 0.04))
    return tmp_path / "cache" / "remote"


@pytest.fixture
def web():
    """A web server without files."""
    with server.serve({}) as opened:
        yield opened
