"""Build the documentation into site/: `make docs`.

The pages are copied to .pages/, together with those that are not files of docs/, so that nothing is written twice:
README, CONTRIBUTING and CHANGELOG are shown as they are, the references of settings and commands are generated from the
program, and every tutorial is a notebook as well.
"""

import html
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import command_reference
import settings_reference

ROOT = Path(__file__).parents[2]
PAGES = ROOT / ".pages"  # docs_dir in zensical.toml
COPIED = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
WITHOUT_SIDEBAR = "---\nhide: [navigation]\n---\n"

IMAGE = re.compile(r"!\[([^\]]*)\]\((?:\.\./)*images/([\w-]+\.svg)\)")
PARAGRAPH = re.compile(rf"^(?:{IMAGE.pattern}\s*)+$", re.MULTILINE)

# A fenced block of a tutorial, and its cell in a notebook; a block with a title is a file.
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?[^\n]*\n(.*?)^```\n', re.DOTALL | re.MULTILINE)
CELLS = {"python": "", "sh": "%%bash\n"}
NOTEBOOK = {"metadata": {"language_info": {"name": "python"}}, "nbformat": 4, "nbformat_minor": 4}

# Links that a reader may follow (<a href>) are not requests. <link rel="canonical"> and the like are not either.
ADDRESS = r"[\"']?((?:https?:)?//[^\s\"'>)]+)"
REQUESTS = (
    re.compile(rf"<(?:script|img|iframe|source|video|audio|embed|object)\b[^>]*?\b(?:src|data)={ADDRESS}"),
    re.compile(rf"<link\b(?=[^>]*\brel=[\"']?(?:stylesheet|preload|preconnect|icon|manifest))[^>]*\bhref={ADDRESS}"),
    re.compile(rf"(?:@import|url\()\s*{ADDRESS}"),
)


def write_pages() -> None:
    """Copy docs/ to .pages/ and add the other pages, with links adjusted to their new place."""
    shutil.rmtree(PAGES, ignore_errors=True)
    shutil.copytree(ROOT / "docs", PAGES, ignore=shutil.ignore_patterns("*.py", "__pycache__", "tools"))
    for source, page in COPIED.items():
        text = (ROOT / source).read_text(encoding="utf-8").replace("](docs/", "](")
        for name, target in COPIED.items():
            text = text.replace(f"]({name})", f"]({target})")
        (PAGES / page).write_text(WITHOUT_SIDEBAR + text if page == "index.md" else text, encoding="utf-8")
    (PAGES / "configuration.md").write_text(settings_reference.page(), encoding="utf-8")
    (PAGES / "commands.md").write_text(command_reference.page(), encoding="utf-8")
    for path in (PAGES / "tutorials").glob("*.md"):
        text = path.read_text(encoding="utf-8")
        path.with_suffix(".ipynb").write_text(notebook(text), encoding="utf-8")
        path.write_text(f"{text}\n[This page as a notebook]({path.stem}.ipynb)\n", encoding="utf-8")
    for path in PAGES.rglob("*.md"):
        path.write_text(PARAGRAPH.sub(drawings, path.read_text(encoding="utf-8")), encoding="utf-8")


def drawings(paragraph: re.Match[str]) -> str:
    """Return the SVG pictures of a paragraph as elements of the page, so that they take the colors of the theme.

    A picture that is only linked does not know whether the reader chose the light or the dark theme.
    """

    def drawing(image: re.Match[str]) -> str:
        label = f'<svg role="img" aria-label="{html.escape(image[1])}"'
        return (ROOT / "docs" / "images" / image[2]).read_text(encoding="utf-8").replace("<svg", label, 1)

    return f'<div class="drawings">{IMAGE.sub(drawing, paragraph[0])}</div>\n'


def notebook(page: str) -> str:
    """Return a tutorial as a Jupyter notebook without outputs; what the page shows as output stays text."""
    page = re.sub(r"\.md([#)])", r".html\1", page.removeprefix(WITHOUT_SIDEBAR))
    text, *parts = BLOCK.split(page)
    cells = [{"cell_type": "markdown", "source": text}]
    for language, title, code, text in zip(*(parts[i::4] for i in range(4)), strict=True):
        if title or language in CELLS:
            first = f"%%writefile {title}\n" if title else CELLS[language]
            cells.append({"cell_type": "code", "source": first + code, "execution_count": None, "outputs": []})
        else:
            cells.append({"cell_type": "markdown", "source": f"```{language}\n{code}```"})
        cells.append({"cell_type": "markdown", "source": text})
    return json.dumps({"cells": [{"metadata": {}, **cell} for cell in cells], **NOTEBOOK}, indent=1)


def requests_of(site: Path) -> list[str]:
    """Return what pages and style sheets of the site would request from other servers when they are opened."""
    return [
        f"{path.relative_to(site)}: {address}"
        for path in sorted(site.rglob("*"))
        if path.suffix in (".html", ".css")
        for pattern in REQUESTS
        for address in pattern.findall(path.read_text(encoding="utf-8"))
    ]


def main() -> None:
    """Write the pages, build the site from them, and check it."""
    write_pages()
    zensical = Path(sys.executable).with_name("zensical")
    build = subprocess.run([zensical, "build", "--clean", "--strict"], cwd=ROOT, check=False)
    if build.returncode:
        sys.exit(build.returncode)
    if requests := requests_of(ROOT / "site"):
        sys.exit("The site requests other servers:\n" + "\n".join(requests))


if __name__ == "__main__":
    main()
