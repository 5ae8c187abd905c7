"""The objectives inside other people's trainers: one module per package, imported by its full name.

`state` saves and loads an objective next to a trainer's own checkpoint files.
"""

from nuclr.integrations.state import STATE_FILE, load_state, save_state

__all__ = ["STATE_FILE", "load_state", "save_state"]
