"""mkdocs hook: the pages that are not files of docs/, so that nothing is written twice.

README, CONTRIBUTING and CHANGELOG are shown as they are. The references of settings and commands are generated from the
program.
"""

from pathlib import Path

import command_reference
import settings_reference
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

COPIED = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
WITHOUT_SIDEBAR = "---\nhide: [navigation]\n---\n"
GENERATED = {"configuration.md": settings_reference.page, "commands.md": command_reference.page}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages, with links adjusted to docs/."""
    root = Path(config.config_file_path).parent
    for source, page in COPIED.items():
        text = (root / source).read_text(encoding="utf-8").replace("](docs/", "](")
        for name, target in COPIED.items():
            text = text.replace(f"]({name})", f"]({target})")
        files.append(File.generated(config, page, content=WITHOUT_SIDEBAR + text if page == "index.md" else text))
    for page, write in GENERATED.items():
        files.append(File.generated(config, page, content=write()))
    return files
