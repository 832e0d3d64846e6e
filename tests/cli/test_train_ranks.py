"""The processes that `parcompiler train` starts on one machine."""

import signal
from collections.abc import Iterator

import pytest

from parcompiler.cli import train

FAILS = "import os, sys, time; time.sleep(60) if os.environ['RANK'] == '0' else sys.exit(3)"


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


def test_a_rank_that_waits_for_one_that_failed_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "GRACE", 0.2)
    assert train._ranks(["-c", FAILS], 2) == 3


def test_ranks_that_end_well_are_waited_for() -> None:
    assert train._ranks(["-c", "import time; time.sleep(0.3)"], 2) == 0
