"""The first view of a page answers a newcomer: what is where, how long, why so, what next."""

import html
import re

from parcompiler.report import Report, web
from parcompiler.report.overview import bounded, following
from parcompiler.report.units import SECONDS, percent, quantity
from tests.report.programs import small_gpt


def summary(report: Report) -> str:
    """The text of a page before its tables, without its head and scripts."""
    page = re.sub(r"<(style|script)\b.*?</\1>", " ", web.page(report), flags=re.DOTALL)
    text = html.unescape(re.sub(r"<(?!wbr)[^>]*>", " ", page)).replace("<wbr>", "")
    return " ".join(text.partition("Work of a micro-batch")[0].split())


def test_a_newcomer_finds_four_answers() -> None:
    report = small_gpt().report
    text = summary(report)
    for j, stage in enumerate(report.stages):  # what is where
        assert f"stage {j} rank {stage.rank}" in text
        assert stage.blocks[0] in text
    assert f"Predicted step {quantity(report.step.seconds, SECONDS)}" in text  # how long
    assert f"MFU {percent(report.step.mfu)}" in text
    assert "of the busiest rank's" in bounded(report) and bounded(report) in text  # why so long
    assert "Try next: --" in following(report) and following(report) in text  # what next
