"""The report: a folder that a command wrote -> one self-contained HTML page.

`write` chooses the page of a folder. `pages/` has one file per kind of page: what it reads and which sections it has.
`sections/` has the sections of a training page, one file per section; each returns typed content. `charts/` draws
numbers as SVG. `render` turns content into HTML by the templates. `training_run` holds what a training run's sections
share: its logs, its model, and a sample of its pairs.
"""

from nuclr.report.render import Context, LeaveOut, Options, Section
from nuclr.report.write import register_section, unregister_section, write_report

__all__ = ["Context", "LeaveOut", "Options", "Section", "register_section", "unregister_section", "write_report"]
