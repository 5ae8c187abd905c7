"""The section "use" of a training page: the lines that load the model, search with it and export it."""

import keyword
import re
import shlex
from dataclasses import dataclass

from nuclr.report.render import LeaveOut
from nuclr.report.training_run import TrainingRun
from nuclr.runs import folder
from nuclr.runs.side_words import SideWords

ENCODERS = {"image": "encode_images", "text": "encode_texts"}
EXAMPLES = {"image": '["a.jpg", "b.jpg"]', "text": '["one text", "another text"]'}
WRITTEN_TO_ONNX = {"image", "text", "vector"}


@dataclass(frozen=True)
class Use:
    """Content of the section: what is searched, by what, and the lines to copy."""

    query: SideWords
    item: SideWords
    search: str
    corrected: str
    measure: str
    exports: str


@dataclass(frozen=True)
class _Side:
    """How the lines write one side: its words, the method that encodes it, and the name of the variable."""

    words: SideWords
    method: str
    variable: str

    def encoded(self, variable: str) -> str:
        return f"model.{self.method}({variable})"

    def assignment(self, prefix: str = "") -> list[str]:
        """Return the line that makes the variable; the comment says what belongs there if no example can be given."""
        if self.words.kind in EXAMPLES:
            return [f"{prefix}{self.variable} = {EXAMPLES[self.words.kind]}"]
        if self.words.kind == "vector":
            return [f'{prefix}{self.variable} = np.load("{prefix}{self.variable}.npy")']
        return [f"{prefix}{self.variable} = [...]  # {self.words.kind} inputs"]


def use_this_model(context: TrainingRun) -> Use:
    """Return the lines for the model of a run.

    Raises:
        LeaveOut: if the run has no model yet, or it cannot be loaded.

    """
    path = context.log.folder
    if not (path / folder.MODEL).is_dir():
        raise LeaveOut()
    if context.options.model:
        context.require_model()
    query, item = _query_and_item(context)
    vectors = "vector" in (query.words.kind, item.words.kind)
    search = [
        *(["import numpy as np"] if vectors else []),
        "from nuclr.models import DualEncoder",
        "",
        f'model = DualEncoder.from_pretrained("{_in_quotes((path / folder.MODEL).as_posix())}")',
        *item.assignment(),
        *query.assignment("query_" if query.variable == item.variable else ""),
    ]
    asked = f"query_{query.variable}" if query.variable == item.variable else query.variable
    search += [
        f"gallery = {item.encoded(item.variable)}",
        f"scores, found = ({query.encoded(asked)} @ gallery.T).topk(2)  # the two best per row",
    ]
    corrected = [
        "from nuclr.popularity import PopularityCorrection",
        "",
        *query.assignment("training_"),
        f"fix = PopularityCorrection().fit({query.encoded(f'training_{query.variable}')}, gallery)",
        f"scores, found = (fix.queries({query.encoded(asked)}) @ fix.gallery(gallery).T).topk(2)",
    ]
    measure = "" if context.views else f"nuclr evaluate {shlex.quote(path.as_posix())} --correct bank=train"
    return Use(query.words, item.words, "\n".join(search), "\n".join(corrected), measure, _exports(context))


def _query_and_item(context: TrainingRun) -> tuple[_Side, _Side]:
    """Return the side that asks and the side that is searched: texts ask for images, otherwise x asks for y."""
    x, y = (
        _Side(words, _method(letter, words, other), _variable(words))
        for letter, words, other in zip("xy", context.words, reversed(context.words), strict=True)
    )
    return (y, x) if (x.words.kind, y.words.kind) == ("image", "text") else (x, y)


def _method(letter: str, words: SideWords, other: SideWords) -> str:
    """Return the method by modality, or by side if both sides have the same one."""
    return ENCODERS[words.kind] if words.kind in ENCODERS and other.kind != words.kind else f"encode_{letter}"


def _variable(words: SideWords) -> str:
    name = re.sub(r"\W+", "_", words.many).strip("_").lower()
    return name if name.isidentifier() and not keyword.iskeyword(name) else f"items_{name}".rstrip("_")


def _in_quotes(text: str) -> str:
    """Return a text as it stands between double quotes in Python."""
    return text.replace("\\", "\\\\").replace('"', '\\"')


def _exports(context: TrainingRun) -> str:
    """Return one command per format that fits the sides of the run."""
    kinds = {words.kind for words in context.words}
    formats = ["sentence-transformers"] if "text" in kinds else []
    formats += ["onnx"] if kinds <= WRITTEN_TO_ONNX else []
    formats += ["hf", "open-clip"] if context.log.settings.model.pretrained and kinds == {"image", "text"} else []
    path = context.log.folder
    return "\n".join(
        f"nuclr export {shlex.quote(path.as_posix())} --to {name} --out {shlex.quote(f'{path.name}-{name}')}"
        for name in formats
    )
