"""The page of a report in a browser: it draws, answers the mouse, can be read, does no harm."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page

from tests.browser.pages import Opened, large, three_dimensional, until
from tests.report.programs import small_gpt
from tests.report.test_hostile_names import with_names

LARGEST = 15_000_000  # bytes of a page
SMALL = 2_500_000  # bytes of the page of a few ranks: plotly.js is packed
LONGEST = 5.0  # seconds of its main thread until all is drawn
HOSTILE = "</script><script>window.broken=1</script><img src=x onerror='window.broken=2'>\"'`${}<b>"


@pytest.fixture(scope="module")
def opened(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    """A measured report of four ranks."""
    path = tmp_path_factory.mktemp("page") / "report.html"
    three_dimensional().to_html(path)
    found = Opened(browser, path)
    yield found
    found.page.close()


@pytest.fixture
def page(opened: Opened) -> Page:
    """Its page, as it was opened."""
    opened.page.set_viewport_size({"width": 1440, "height": 900})
    opened.page.emulate_media(color_scheme="light", media="screen")
    opened.page.evaluate("scrollTo(0, 0)")
    return opened.page


def charts(page: Page) -> dict[str, Any]:
    """How many shapes and images each chart has drawn."""
    found: dict[str, Any] = page.evaluate(
        """() => Object.fromEntries([...document.querySelectorAll("[data-figure]")].map((place) =>
            [place.dataset.figure,
             place.querySelectorAll(
               ".barlayer .point path, .scatterlayer .js-line, .heatmaplayer image").length]))"""
    )
    return found


def test_all_charts_are_drawn_and_the_console_is_silent(opened: Opened, page: Page) -> None:
    drawn = charts(page)
    assert drawn.keys() == {"predicted", "measured", "memory", "traffic"}
    compute = [e for e in three_dimensional().trail.events if e.kind in ("FORWARD", "BACKWARD")]
    assert drawn["predicted"] >= len(compute)
    assert drawn["measured"] >= len(compute)
    assert drawn["memory"] == 4, "a line for each rank"
    assert drawn["traffic"] == 1
    assert opened.said == []
    assert opened.asked == [opened.address], "nothing but the page itself is loaded"
    assert Path(opened.address.removeprefix("file://")).stat().st_size < SMALL


def test_the_mouse_over_a_bar_tells_instruction_micro_batch_and_times(page: Page) -> None:
    bar = page.locator("[data-figure=predicted] .point").first
    bar.scroll_into_view_if_needed()
    box = bar.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2, steps=3)
    label = page.locator("[data-figure=predicted] .hoverlayer .hovertext")
    label.wait_for()
    text = label.first.text_content() or ""
    assert "FORWARD stage 0 mb 0" in text
    assert "rank 0, micro-batch 0" in text
    assert "from" in text
    assert "µs" in text or "ms" in text


def test_what_is_zoomed_in_the_predicted_step_is_zoomed_in_the_measured_one(page: Page) -> None:
    area = page.locator("[data-figure=predicted] .nsewdrag").first
    area.scroll_into_view_if_needed()
    box = area.bounding_box()
    assert box is not None
    ranges = """() => ["predicted", "measured"].map((name) =>
        document.querySelector(`[data-figure=${name}]`).layout.xaxis.range)"""
    before = page.evaluate(ranges)
    page.mouse.move(box["x"] + 100, box["y"] + 30)
    page.mouse.down()
    page.mouse.move(box["x"] + 400, box["y"] + 34, steps=4)
    page.mouse.up()
    until(page, f"JSON.stringify(({ranges})()) !== {str(before).replace(' ', '')!r}")
    until(page, f"(([a, b]) => String(a) === String(b))(({ranges})())")
    zoomed = page.evaluate(ranges)
    assert zoomed[0] == zoomed[1]
    assert zoomed[0][1] - zoomed[0][0] < 0.5 * (before[0][1] - before[0][0])


def test_a_click_on_a_heading_sorts_figures_by_size(page: Page) -> None:
    table = page.locator(".card", has_text="Where compute goes").locator("table")
    heading = table.locator("th.number").first
    seconds = """(cells) => cells.map((cell) => parseFloat(cell.textContent) *
        (cell.textContent.includes("ms") ? 1000 : 1)).filter((number) => number)"""
    for order in ("descending", "ascending"):
        heading.click()
        assert heading.get_attribute("aria-sort") == order
        shown = table.locator("tbody tr td:nth-child(3)").evaluate_all(seconds)
        assert len(shown) > 3
        assert shown == sorted(shown, reverse=order == "descending")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_serious_fault(page: Page, scheme: Any) -> None:
    page.emulate_media(color_scheme=scheme)
    results = Axe().run(page).response
    grave = [v for v in results["violations"] if v["impact"] in ("serious", "critical")]
    assert grave == [], [(v["id"], v["nodes"][0]["html"][:200]) for v in grave]
    assert len(results["passes"]) > 15, "the rules did run"


def test_dark_and_light_are_those_of_the_reader_and_paper_is_white(page: Page) -> None:
    color = "getComputedStyle(document.body).backgroundColor"
    ink = "document.querySelector('[data-figure=memory]').layout.font.color"
    light = page.evaluate(color), page.evaluate(ink)
    page.emulate_media(color_scheme="dark")
    until(page, f"{ink} !== {light[1]!r}")
    assert page.evaluate(color) == "rgb(17, 20, 26)" != light[0]
    page.evaluate(f"addEventListener('beforeprint', () => {{ window.onPaper = {ink} }})")
    assert page.pdf(prefer_css_page_size=True).startswith(b"%PDF")
    assert page.evaluate("onPaper") == light[1]
    until(page, f"{ink} !== {light[1]!r}")


@pytest.mark.parametrize("width", [1440, 1024, 390])
def test_nothing_stands_out_of_the_page(page: Page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    until(page, "document.documentElement.scrollWidth <= document.documentElement.clientWidth")


def test_hostile_names_are_shown_and_do_nothing(browser: Browser, tmp_path: Path) -> None:
    with_names(small_gpt().report, HOSTILE).to_html(tmp_path / "report.html")
    opened = Opened(browser, tmp_path / "report.html", "dark")
    page = opened.page
    assert page.locator("h1").inner_text() == f"{HOSTILE} on 2 × {HOSTILE}"
    assert page.title() == f"{HOSTILE} on 2 × {HOSTILE}"
    assert page.evaluate("window.broken") is None
    assert page.locator("script").count() == 3
    assert page.locator("img, b:not(figure b)").count() == 0
    assert (opened.said, opened.asked) == ([], [opened.address])
    page.close()


def test_a_page_of_16_ranks_and_512_micro_batches_is_quick(
    browser: Browser, tmp_path: Path
) -> None:
    path = tmp_path / "report.html"
    report = large()
    report.to_html(path)
    assert path.stat().st_size < LARGEST
    opened = Opened(browser, path)
    assert 0 < opened.seconds() < LONGEST
    assert charts(opened.page)["predicted"] == 16 + 2, "an image a rank, two colours' names"
    chart = opened.page.locator("[data-figure=predicted] .nsewdrag").first
    chart.scroll_into_view_if_needed()
    area = chart.bounding_box()
    assert area is not None
    opened.page.mouse.move(area["x"] + 2, area["y"] + area["height"] / 32, steps=3)
    label = opened.page.locator("[data-figure=predicted] .hoverlayer .hovertext")
    label.wait_for()
    assert "stage 0 mb" in (label.first.text_content() or "")
    assert opened.said == []
    opened.page.close()
