"""Names from a model are data: they are shown as they are, and do nothing."""

import dataclasses
import html
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from parcompiler.report import Report, web
from parcompiler.report.events import StepEvent
from parcompiler.report.names import clean, numbers, ranges
from parcompiler.report.web.pages import figures
from tests.report.programs import HOSTILE, odd, small_gpt

NAMES = (*HOSTILE, "</title><script>alert(1)</script>", "\r\x07\x9b31m", "x" * 500, ":smile:", "")


def with_names(report: Report, name: str) -> Report:
    """A report whose every name is another one."""
    return dataclasses.replace(
        report,
        model=dataclasses.replace(report.model, name=name),
        mesh=dataclasses.replace(report.mesh, device=name),
        stages=tuple(dataclasses.replace(s, blocks=(name, name)) for s in report.stages),
        values=tuple(dataclasses.replace(v, name=name) for v in report.values),
        shared=tuple(dataclasses.replace(s, name=name, aliases=(name,)) for s in report.shared),
        unread=(name,),
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("width", [80, 200])
def test_nothing_but_letters_reaches_the_terminal(name: str, width: int) -> None:
    text = with_names(small_gpt().report, name).to_text(width)
    assert text.isascii()
    assert all(line.isprintable() for line in text.splitlines())
    assert max(map(len, text.splitlines())) <= width


def test_markup_is_shown_and_not_interpreted() -> None:
    text = odd().report.to_text()
    assert "[red]x[/red]" in text
    assert r"a\nb" in text
    assert r"\x1b[31mred\x1b[0m" in text
    assert r"\u202egnp" in text


class Tags(HTMLParser):
    """The tags and the text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note a tag."""
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        """Note text."""
        self.text += data


OWN = "html head meta title style body a nav strong main header h1 h2 h3 p dl div dt dd section ol "
OWN += "ul li small figure span table thead tbody tr th td br wbr noscript script"


@pytest.mark.parametrize("name", NAMES)
def test_a_page_has_only_its_own_tags(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parcompiler.report.web.pages._plotly", str)  # 2 MB without a name
    page = Tags(web.page(with_names(small_gpt().report, name)))
    assert page.tags == set(OWN.split())
    assert not {attribute for attribute in page.attributes if attribute.startswith("on")}
    assert page.attributes.isdisjoint({"src", "srcset", "action", "ping"})
    first = clean(name)[:30]
    assert first in page.text


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_gets_a_summary_without_scripts(name: str) -> None:
    fragment = with_names(small_gpt().report, name)._repr_html_()
    found = Tags(fragment)
    assert found.tags == {"div", "table", "tr", "td"}
    assert found.attributes == {"style", "title"}
    assert clean(name)[:30] in found.text
    assert len(fragment) < 20_000


def test_a_page_needs_nothing_else_and_is_always_the_same(tmp_path: Path) -> None:
    report = small_gpt().report
    report.to_html(tmp_path / "first.html")
    Report.from_json(report.to_json()).to_html(tmp_path / "second.html")
    page = (tmp_path / "first.html").read_bytes()
    assert page == (tmp_path / "second.html").read_bytes()
    assert b"default-src 'none'" in page, "the browser is told to load nothing"
    assert b"prefers-color-scheme: dark" in page
    text = html.unescape(Tags(page.decode()).text)
    assert "Work of a micro-batch" in text


@pytest.mark.parametrize("name", NAMES)
def test_names_in_charts_are_no_markup(name: str) -> None:
    event = StepEvent(0, 0.0, 1e-3, "SEND <a_href='x'>&lt;{y} mb 0 to 1")
    report = with_names(small_gpt().report, name)
    report = dataclasses.replace(report, trail=dataclasses.replace(report.trail, events=(event,)))
    (bar,) = (bar for bar in figures(report)["predicted"].data if bar["name"] == "messages")
    (text,) = bar["hovertext"]
    assert "&lt;a_href='x'&gt;&amp;lt;{y}" in text
    assert not set(re.findall("<[^>]*>", text)) - {"<b>", "</b>", "<br>"}


@pytest.mark.parametrize("name", NAMES)
def test_names_survive_json_and_trace(name: str, tmp_path: Path) -> None:
    report = with_names(small_gpt().report, name)
    assert Report.from_json(report.to_json()) == report
    odd().report.to_trace(tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]


@pytest.mark.parametrize(
    ("names", "short"),
    [
        ([], ""),
        (["a"], "a"),
        (["h.0", "h.1"], "h.0, h.1"),
        (["h.0", "h.1", "h.2"], "h.0 … h.2 (3)"),
        (["h.9", "h.10", "h.11"], "h.9 … h.11 (3)"),
        (["h.0", "h.2", "h.4"], "h.0, h.2, h.4"),
        (["a.0", "b.1", "c.2"], "a.0, b.1, c.2"),
        (["h.0.0", "h.0.1", "h.1.1"], "h.0.0, h.0.1, h.1.1"),
        (["h.0@1", "h.1@1", "h.2@1", "h.0@2"], "h.0@1 … h.2@1 (3), h.0@2"),
        (["1.b", "2.a", "2.b", "3.a", "3.b", "norm"], "1.b … 3.b (5), norm"),
        (["1" * 30, "2" * 30, "3" * 30], ", ".join(["1" * 30, "2" * 30, "3" * 30])),
    ],
)
def test_rows_of_names_are_abbreviated(names: list[str], short: str) -> None:
    assert ranges(names) == short


def test_numbers_are_abbreviated_too() -> None:
    assert numbers([0]) == "0"
    assert numbers([0, 1]) == "0, 1"
    assert numbers(range(8)) == "0 … 7"
