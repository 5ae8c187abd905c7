"""Plain data -> one HTML file that needs nothing beside it.

The page's only script is named by its hash in a content security policy, so no other could run even if text became
markup, and nothing can be requested from anywhere. Text is escaped by the templates.
"""

import base64
import hashlib
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from nuclr import __version__
from nuclr.errors import UserError
from nuclr.report import numbers
from nuclr.report.charts import to_json


def render(template: str, **values: Any) -> str:
    """The page of this template."""
    environment = Environment(
        loader=PackageLoader("nuclr.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "count": numbers.count,
        "percent": numbers.percent,
        "number": numbers.number,
        "times": numbers.times,
        "score": numbers.score,
        "duration": numbers.duration,
        "json": to_json,
    }
    style, script = (_resource(name) for name in ("style.css", "page.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return environment.get_template(template).render(
        style=Markup(style),
        script=Markup(script),
        policy=policy,
        version=__version__,
        **values,
    )


def write(path: Path, page: str) -> None:
    """Put the page in its place, whole or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_text(page, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); name another file with --out") from None
    finally:
        temporary.unlink(missing_ok=True)


def _resource(name: str) -> str:
    return (resources.files("nuclr.report") / "templates" / name).read_text(encoding="utf-8")
