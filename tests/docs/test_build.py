"""The pages are built without a warning, and fetch nothing when they are read."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from playwright.sync_api import sync_playwright

from tests.browser.chromium import chromium
from tests.docs.pages import PAGES, ROOT

_FETCHED = re.compile(r'<(?:script|img|iframe|source)[^>]*\ssrc="https?:|<link[^>]*\shref="https?:')


@pytest.mark.sweep  # `make check` builds them, too
def test_the_pages_are_built_and_fetch_nothing(tmp_path: Path) -> None:
    site = tmp_path / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    for page in PAGES:
        text = (site / page).with_suffix(".html").read_text()
        assert not _FETCHED.search(text), page
    pictures = (site / "concepts" / "schedules.html").read_text().count('<figure class="schedule">')
    assert pictures == 9
    assert (
        "parcompiler plan [OPTIONS] MODEL" in (site / "reference" / "command-line.html").read_text()
    )
    browser = chromium()
    if browser is not None:
        with sync_playwright() as playwright:
            opened = playwright.chromium.launch(executable_path=browser)
            shown = opened.new_page()
            shown.goto((site / "how-to" / "train.html").as_uri())
            shown.locator("input.md-search__input").first.click()
            shown.locator("input.md-search__input").first.type("warm-up")
            shown.wait_for_selector(".md-search-result__link", state="attached")
            opened.close()
