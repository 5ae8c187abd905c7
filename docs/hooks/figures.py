"""mkdocs hook: put the SVG pictures of docs/images into the pages, so that they take the colors of the theme.

A picture that is only linked does not know whether the reader chose the light or the dark theme. Pictures in the same
paragraph are placed next to each other if there is space.
"""

import html
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

IMAGE = re.compile(r'<img alt="([^"]*)" src="(?:\.\./)*images/([\w-]+\.svg)" ?/?>')
PARAGRAPH = re.compile(rf"<p>((?:{IMAGE.pattern}\s*)+)</p>")


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Replace paragraphs that consist of such images."""
    folder = Path(config.docs_dir) / "images"

    def drawing(image: re.Match[str]) -> str:
        label = f'<svg role="img" aria-label="{html.escape(html.unescape(image[1]))}"'
        return (folder / image[2]).read_text(encoding="utf-8").replace("<svg", label, 1)

    return PARAGRAPH.sub(lambda found: f'<div class="drawings">{IMAGE.sub(drawing, found[1])}</div>', content)
