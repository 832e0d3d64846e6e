"""The pages of the documentation, taken apart: their code, what it prints, their commands."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Example:
    """A block of code that runs, the line it begins on, and what the page says it prints."""

    code: str
    line: int
    printed: str | None = None


def examples(text: str) -> Iterator[Example]:
    """The blocks of `python`, in order; a block of `text` right behind one is what it prints.

    Blocks of `py` are shown and not run: what they need is not at hand when a page is read.
    """
    fences = list(_FENCE.finditer(text))
    for number, found in enumerate(fences):
        if found[1] != "python":
            continue
        after = fences[number + 1] if number + 1 < len(fences) else None
        beside = after is not None and not text[found.end() : after.start()].strip()
        printed = after[2] if after is not None and beside and after[1] == "text" else None
        yield Example(found[2], text[: found.start()].count("\n") + 2, printed)


def commands(text: str) -> Iterator[str]:
    """The lines of shell blocks."""
    for found in _FENCE.finditer(text):
        if found[1] == "sh":
            yield from found[2].replace("\\\n", " ").splitlines()
