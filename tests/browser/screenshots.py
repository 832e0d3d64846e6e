"""Pictures of a real report for the documentation: make screenshots.

The report is the one that the first command of the README writes.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

from tests.browser.chromium import MISSING, chromium
from tests.browser.pages import Opened

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "images"
MODEL = "hf:examples/configurations/llama-3.1-8b.json"
COMMAND = ("plan", MODEL, "--mesh", "pipeline=4,tensor=2,data=2", "--device", "h100")
LARGEST = 300_000  # bytes of a picture
NARROW = 430  # the columns of a phone


def main() -> int:
    """Draw all pictures; 1 when one is too large or there is no browser."""
    path = chromium()
    if path is None:
        print(MISSING, file=sys.stderr)
        return 1
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page = Path(folder) / "report.html"
        plan = [sys.executable, "-m", "parcompiler", *COMMAND, "--html", str(page)]
        subprocess.run(plan, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        browser = playwright.chromium.launch(executable_path=path)
        draw(browser, page)
        browser.close()
    sizes = {picture.name: picture.stat().st_size for picture in sorted(FOLDER.glob("report*.png"))}
    print(*(f"{size:8,} {name}" for name, size in sizes.items()), sep="\n")
    return int(max(sizes.values()) > LARGEST)


def draw(browser: Browser, page: Path) -> None:
    """The first screen in light, dark and narrow, and two charts by themselves."""
    light, dark = Opened(browser, page), Opened(browser, page, "dark")
    light.page.screenshot(path=FOLDER / "report.png")
    dark.page.screenshot(path=FOLDER / "report-dark.png")
    light.page.locator("#memory").screenshot(path=FOLDER / "report-memory.png")
    step = "document.querySelector('[data-figure=predicted]')"
    end = light.page.evaluate(f"{step}.layout.xaxis.range[1]")
    light.page.evaluate(f"Plotly.relayout({step}, {{'xaxis.range': [0, {end / 5}]}})")
    light.page.locator("#timeline").screenshot(path=FOLDER / "report-timeline.png")
    narrow = Opened(browser, page, width=NARROW)
    narrow.page.screenshot(path=FOLDER / "report-narrow.png")


if __name__ == "__main__":
    sys.exit(main())
