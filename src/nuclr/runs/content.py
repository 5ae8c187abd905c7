"""The settings that determine a run's result, without names, paths, seed and settings of the machine."""

import hashlib
import json
from typing import Any

from nuclr.runs.folder import FREE_ON_RESUME
from nuclr.runs.settings import Objective, Settings, flatten, to_dict


def content(settings: Settings) -> dict[str, Any]:
    """Return the settings that determine a run's result, as a flat dict without names, paths and machine settings.

    Values equal to the default are left out, so a setting added by a later version does not change any name.
    """
    defaults = _flat(Settings(objective=Objective(settings.objective.name))) | {"objective.name": Objective().name}
    free = FREE_ON_RESUME | {"name", "seed"}
    return {key: value for key, value in _flat(settings).items() if key not in free and defaults.get(key) != value}


def content_hash(settings: Settings) -> str:
    """Return the first eight digits of a hash of `content`."""
    return hashlib.sha256(json.dumps(content(settings), sort_keys=True).encode()).hexdigest()[:8]


def _flat(settings: Settings) -> dict[str, Any]:
    return dict(flatten(to_dict(settings)))
