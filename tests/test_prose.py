"""Comments, docstrings, messages and documentation use plain English: the words of the old dialect do not come back."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("src", "docs", "configs", "examples", "benchmarks")
SUFFIXES = {".py", ".md", ".html", ".js", ".css", ".yaml"}

# Each pattern with the plain words for it.
DIALECT = {
    r"(re)?told|tell|tells|telling": "say, show, report, distinguish",
    r"anew": "again",
    r"dear(er|est)?": "expensive",
    r"mend(s|ed|ing)?": "fix",
    r"(?<![Tt]here )(is|are) none": "is not one, does not exist",
    # "There is no file" is plain English, "it is no file" is not.
    r"(?<![Tt]here )(is|are|was|were) no(?! (longer|more|less|significant)\b)": "is not a, are not",
    r"(go|goes|going|went|gone) on(?! to\b)": "resume, continue",
    r"beside": "next to",
    r"zeta rests": "is frozen",
    r"for good(?!,)|such as are": "permanently; rephrase",
    r"(row|line|file|number|value|pass|step|entry|minutes) an? (pair|sample|step|pass|epoch|query)": "per",
}
PATTERN = re.compile("|".join(rf"(?P<w{i}>\b(?:{words})\b)" for i, words in enumerate(DIALECT)))

# Parts of lines in which such a word is right.
ALLOWED = ("heads are none", ".tell()")  # the value of a setting, a method


def test_words_of_the_old_dialect_do_not_occur():
    plain = list(DIALECT.values())
    files = [*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))]
    offenders = [
        f"{path.relative_to(ROOT)}:{number}: {match[0]!r} ({plain[int(match.lastgroup[1:])]}): {line.strip()}"
        for path in files
        if path.suffix in SUFFIXES
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        for match in PATTERN.finditer(line)
        if not any(part in line for part in ALLOWED)
    ]
    assert not offenders, f"{len(offenders)} lines to rewrite\n" + "\n".join(offenders)
