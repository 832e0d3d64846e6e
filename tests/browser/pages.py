"""Pages of reports, opened in a browser that remembers what they said and asked for."""

import dataclasses
import time
from pathlib import Path

from playwright.sync_api import Browser, Page

from parcompiler.report import Report
from parcompiler.report.events import Level, StepEvent, Trail
from tests.report.programs import Made, small_gpt, small_t5
from tests.report.test_report import slower

WIDTH, HEIGHT = 1440, 900
RANKS, MICROBATCHES = 16, 512


class Opened:
    """A page with its console, its errors and its requests."""

    def __init__(
        self, browser: Browser, path: Path, scheme: str = "light", width: int = WIDTH
    ) -> None:
        dark = scheme == "dark"
        self.page: Page = browser.new_page(
            viewport={"width": width, "height": HEIGHT}, color_scheme="dark" if dark else "light"
        )
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self._session = self.page.context.new_cdp_session(self.page)
        # Seconds of the page's thread, in which what others do on the machine does not count.
        self._session.send("Performance.enable", {"timeDomain": "threadTicks"})
        self.page.set_default_timeout(120_000)  # a machine may be busy
        self.address = path.as_uri()
        self.page.goto(self.address)
        self.page.wait_for_selector("html[data-ready]", state="attached")

    def seconds(self) -> float:
        """How long the page's main thread has worked."""
        metrics = self._session.send("Performance.getMetrics")["metrics"]
        return next(float(m["value"]) for m in metrics if m["name"] == "TaskDuration")


def until(page: Page, condition: str) -> None:
    """Wait until an expression is true; the page's policy forbids it to evaluate texts itself."""
    end = time.monotonic() + 10
    while not page.evaluate(condition):
        assert time.monotonic() < end, condition
        time.sleep(0.02)


def measured(made: Made) -> Report:
    """A report beside a step that took half as long again."""
    return made.report.measured(1.5 * made.timeline.step_time, slower(made, 1.5))


def three_dimensional() -> Report:
    """A report with a measured step."""
    return measured(small_t5())


def large() -> Report:
    """A pipeline of 16 ranks with 512 micro-batches."""
    report = small_gpt().report
    stages = tuple(dataclasses.replace(report.stages[0], rank=rank) for rank in range(RANKS))
    events = tuple(
        StepEvent(rank, begin, begin + length, f"{kind} stage {rank} mb {i}")
        for i in range(MICROBATCHES)
        for rank in range(RANKS)
        for kind, begin, length in (
            ("FORWARD", 3.0 * i + 0.1 * rank, 1.0),
            ("BACKWARD", 3.0 * i + 0.1 * rank + 1.2, 1.5),
        )
    )
    levels = tuple(Level(1.5 * k, 2**20 * (1 + k % 7)) for k in range(2 * MICROBATCHES))
    return dataclasses.replace(
        report,
        mesh=dataclasses.replace(report.mesh, pipeline=RANKS),
        step=dataclasses.replace(report.step, seconds=3.0 * MICROBATCHES + 2),
        stages=stages,
        ranks=report.ranks[:1] * RANKS,
        values=(),
        shared=(),
        trail=Trail(events, (levels,) * RANKS),
    )
