"""The processes that `parcompiler train` starts on one machine, or that are started with it."""

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from parcompiler import cli
from parcompiler.cli import train
from tests.distributed import forked

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


def test_a_rank_that_is_killed_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert train._ranks(["-c", "import os; os.kill(os.getpid(), 9)"], 1) == 128 + 9
    assert "rank 0 was ended by 'Killed' (signal 9): type the sam" in capsys.readouterr().err


def test_ranks_that_end_well_are_waited_for() -> None:
    assert train._ranks(["-c", "import time; time.sleep(0.3)"], 2) == 0


def command(*arguments: str) -> None:
    """The command line as a rank's process."""
    sys.exit(cli.run(arguments))


def test_ranks_that_are_started_again_do_not_go_by_what_the_first_said_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, told = dist.HashStore(), []
    for number in ("0", "1"):  # torchrun's static rendezvous keeps the store
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", number)
        start = train._of_start(store)
        told.append(start.check([train._START]))
        start.set(train._START, "{}")
        told.append(start.check([train._START]))
    assert told == [False, True, False, True]


def test_ranks_that_wait_for_the_first_are_told_why_it_refuses(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes(b"caf\xe9")
    arguments = ["train", "no.py:make", "--mesh", "data=3", "--data", str(tmp_path / "text.txt")]
    told = forked.run(3, command, *arguments, "--save", str(tmp_path / "run"), ok=False)
    why = f"cannot read {tmp_path / 'text.txt'} as text ("
    assert told.count(why) == 3
    assert told.count(f"error: rank 0 has refused to start: {why}") == 2


def test_a_run_that_is_started_as_ranks_has_the_tokenizer_beside_its_weights(
    tmp_path: Path,
) -> None:
    (tmp_path / "text.txt").write_text("a stage is a piece of the model " * 20)
    model = f"{Path(__file__).with_name('models.py')}:wordy"
    arguments = ["train", model, "--mesh", "data=1", "--data", str(tmp_path / "text.txt")]
    run = tmp_path / "run"
    told = forked.run(
        1, command, *arguments, "--save", str(run), "--steps", "1", "--hold-out", "0.2"
    )
    assert "step 1/1  evaluation loss" in told, "rows are never held out in vain"
    assert (run / "weights" / "tokenizer.json").read_text() == (run / "tokenizer.json").read_text()
