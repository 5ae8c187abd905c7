"""The page of `nuclr train`: what a model learned, from the run's folder, its model and its data."""

from pathlib import Path

from nuclr.report.render import Options, Page, Section, describe
from nuclr.report.sections.curves import training_curves
from nuclr.report.sections.examples import retrieval_examples
from nuclr.report.sections.popularity import training_popularity
from nuclr.report.sections.repeat import how_to_repeat, where_time_went
from nuclr.report.sections.summary import describe_run, run_summary
from nuclr.report.sections.use import use_this_model
from nuclr.report.sections.zero_shot import zero_shot_confusion
from nuclr.report.training_run import TrainingRun, open_training_run
from nuclr.runs import folder


def _open(path: Path, options: Options) -> TrainingRun:
    context = open_training_run(path, options)
    try:
        context.sentence = describe_run(context.log)
    except Exception as error:  # results.json may hold anything
        context.note(f"{folder.RESULTS} is damaged: {describe(error)}")
    return context


PAGE = Page(
    kind="training run",
    files=(folder.CONFIG,),
    open=_open,
    sections=[
        Section("summary", "Summary", "sections/summary.html", run_summary, heading=False),
        Section("use", "Use this model", "sections/use.html", use_this_model, menu="Use"),
        Section("curves", "Training curves", "sections/curves.html", training_curves, menu="Curves"),
        Section("examples", "Retrieval examples", "sections/examples.html", retrieval_examples, menu="Examples"),
        Section("zero-shot", "Zero-shot classification", "sections/zero_shot.html", zero_shot_confusion,
                menu="Zero-shot"),
        Section("popularity", "Popularity", "sections/popularity.html", training_popularity),
        Section("time", "Where the time went", "sections/time.html", where_time_went, menu="Time"),
        Section("repeat", "How to repeat this run", "sections/repeat.html", how_to_repeat, menu="Repeat"),
    ],
)  # fmt: skip
