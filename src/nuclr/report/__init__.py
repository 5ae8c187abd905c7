"""The report: a folder that a command wrote -> one self-contained HTML page.

`write` chooses the page of a folder. `page` says what a page is made of and renders it: start there to write one.
`pages/` has one file per kind of page. `charts` draws numbers as SVG, `items` shows images, texts and vectors.
"""

from nuclr.report.charts import Chart
from nuclr.report.page import (
    Answer,
    Card,
    Example,
    Fold,
    Gallery,
    Item,
    LeaveOut,
    Options,
    Page,
    Section,
    Table,
    Text,
    Tile,
)
from nuclr.report.write import register_section, unregister_section, write_report

__all__ = [
    "Answer",
    "Card",
    "Chart",
    "Example",
    "Fold",
    "Gallery",
    "Item",
    "LeaveOut",
    "Options",
    "Page",
    "Section",
    "Table",
    "Text",
    "Tile",
    "register_section",
    "unregister_section",
    "write_report",
]
