"""Links of the documents lead somewhere: to files that are there and headings that are in them."""

import re
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, PAGES, ROOT

DOCUMENTS = [
    *sorted(path.name for path in ROOT.glob("*.md")),
    *(f"docs/{page}" for page in PAGES),
    *sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("benchmarks/**/*.md")),
]
_LINK = re.compile(r"(?<!\\)\]\(([^)\s]+)\)")
_CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub and Python-Markdown make it."""
    plain = re.sub(r"[`*]|\]\([^)]*\)|\[", "", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")


def anchors(text: str) -> set[str]:
    """The anchors of a document."""
    without = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return {slug(found) for found in re.findall(r"^#+ (.+)$", without, re.MULTILINE)}


def faults(path: Path, text: str) -> list[str]:
    """Links of a document that lead nowhere."""
    found = []
    for link in _LINK.findall(_CODE.sub("", text)):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        if not target.exists():
            found.append(f"{link}: there is no {target}")
        elif anchor and anchor not in anchors(target.read_text() if name else text):
            found.append(f"{link}: no heading makes this anchor")
        elif path.is_relative_to(DOCS) and not target.resolve().is_relative_to(DOCS):
            found.append(f"{link}: the built pages have no such file")
    return found


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    path = ROOT / document
    assert faults(path, path.read_text()) == []


def test_links_that_lead_nowhere_are_found() -> None:
    text = "[a](no.md) [b](#here-it-is) [c](#not) [d](https://x.y) `[e](no)`\n\n# Here, it `is`\n"
    found = faults(DOCS / "index.md", text)
    assert [line.partition(":")[0] for line in found] == ["no.md", "#not"]
    assert faults(DOCS / "index.md", "[a](../README.md)") != []


def test_pages_fetch_nothing_when_they_are_read() -> None:
    settings = (ROOT / "mkdocs.yml").read_text()
    assert "font: false" in settings
    for path in DOCS.rglob("*.css"):
        assert "http" not in path.read_text()
