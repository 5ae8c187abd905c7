"""`nuclr demo`: what this package does, on built-in pairs."""

import time
from typing import Annotated

import typer

from nuclr.cli.arguments import split_config
from nuclr.cli.compare import say
from nuclr.cli.report import write_final_report
from nuclr.cli.train import training_errors
from nuclr.errors import UserError


def demo(
    context: typer.Context,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Settings to change, such as seed=1 or out=runs/demo."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the demo in its folder, if there is one.")] = False,
) -> None:
    """Train nine small models on built-in pairs and correct their search, in about two minutes on two CPU cores."""
    from nuclr import files
    from nuclr.runs import config, launch
    from nuclr.studies import demo as study

    path, overrides = split_config(arguments, context)
    if path is not None:
        raise UserError(f"{path}: nuclr demo takes settings, KEY=VALUE; nuclr train takes a config file")
    settings = config.load(study.SETTINGS, overrides)
    out = launch.choose_folder(settings, None, resume)
    if files.is_run(out) and not resume:
        raise UserError(f"{out} already holds a run; name another folder with out=..., or add --resume to continue it")
    begin = time.monotonic()
    cores = launch.cpu_cores()
    typer.echo(study.opening(settings, cores))
    with training_errors(f"continue with nuclr demo out={out} --resume"):
        runs = study.Demo(settings, out, say)
        runs.run(cores)
    typer.echo(study.results_text(runs.results()))
    page = settings.report and write_final_report(out, announce=False)
    typer.echo(study.closing(out, page, time.monotonic() - begin))
