"""The report: a folder that a command wrote -> one self-contained HTML page.

`write` chooses the page of a folder. `page` says what a page is made of and renders it: start there to write one.
`pages/` has one file per kind of page. `charts` draws numbers as SVG, `items` shows images, texts and vectors.
"""

from nuclr.report.page import Options
from nuclr.report.write import write_report

__all__ = ["Options", "write_report"]
