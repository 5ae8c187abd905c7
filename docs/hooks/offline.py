"""mkdocs hook: refuse a site that would request anything from another server when a page is opened."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError

# Links that a reader may follow (<a href>) are not requests. <link rel="canonical"> and the like are not either.
ADDRESS = r"[\"']?((?:https?:)?//[^\s\"'>)]+)"
REQUESTS = (
    re.compile(rf"<(?:script|img|iframe|source|video|audio|embed|object)\b[^>]*?\b(?:src|data)={ADDRESS}"),
    re.compile(rf"<link\b(?=[^>]*\brel=[\"']?(?:stylesheet|preload|preconnect|icon|manifest))[^>]*\bhref={ADDRESS}"),
    re.compile(rf"(?:@import|url\()\s*{ADDRESS}"),
)


def on_post_build(config: MkDocsConfig) -> None:
    """Search the pages and style sheets of the built site."""
    site = Path(config.site_dir)
    requests = [
        f"{path.relative_to(site)}: {address}"
        for path in sorted(site.rglob("*"))
        if path.suffix in (".html", ".css")
        for pattern in REQUESTS
        for address in pattern.findall(path.read_text(encoding="utf-8"))
    ]
    if requests:
        raise PluginError("The site requests other servers:\n" + "\n".join(requests))
