"""What tensor ranks spend in collectives, measured among processes that compute between."""

from __future__ import annotations

import pytest
import torch

from parcompiler.bench import local, waits
from parcompiler.bench.local import LocalBench
from parcompiler.bench.waits import Asked, Round, question, typical, wait_of
from parcompiler.cost.operation import Operation
from parcompiler.errors import LaunchError

ACTIONS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")


def sent(action: str, nbytes: float = 1024.0, ranks: int = 2) -> Operation:
    return Operation(action, "exchange", 0.0, nbytes, torch.float32, ranks)


@pytest.mark.parametrize("action", ACTIONS)
def test_every_collective_is_measured_among_processes(action: str) -> None:
    asked = question(sent(action), 0.0)
    assert wait_of(asked, seconds=0.001) > 0


@pytest.mark.parametrize("dtype", ["int64", "bfloat16", "bool"])
def test_values_of_any_kind_are_gathered(dtype: str) -> None:
    assert wait_of(Asked("all-gather", 100, dtype, 2, 1e-4), seconds=0.001) > 0


def test_a_failure_of_a_process_is_told() -> None:
    with pytest.raises(LaunchError, match="KeyError: 'hop'"):
        wait_of(Asked("hop", 1024, "float32", 2, 1e-4))


def test_what_was_asked_once_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Asked] = []

    def noted(one: Asked) -> float:
        asked.append(one)
        return 0.5

    monkeypatch.setattr(local, "cores", lambda: 2)
    monkeypatch.setattr(local, "wait_of", noted)
    bench = LocalBench(torch.device("cpu"))
    assert bench.exchanged([sent("all-reduce"), sent("all-reduce")], 0.004) == 1.0
    assert bench.exchanged([sent("all-gather"), sent("all-reduce")], 0.0041) == 1.0
    assert [one.action for one in asked] == ["all-reduce", "all-gather"]


def test_ranks_that_cannot_be_busy_at_once_are_left_to_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local, "cores", lambda: 2)
    monkeypatch.setattr(local, "wait_of", None)  # it would fail
    assert LocalBench(torch.device("cpu")).exchanged([sent("all-reduce", ranks=4)], 0.1) is None
    assert LocalBench(torch.device("cuda")).exchanged([sent("all-reduce")], 0.1) is None


def test_work_is_asked_for_in_powers_of_two_between_bounds() -> None:
    between = [question(sent("all-reduce"), s).between for s in (0.0, 0.003, 0.005, 99.0)]
    assert between == [2.0**-13, 2.0**-8, 2.0**-8, 0.25]


def test_the_whole_value_is_what_is_asked_about() -> None:
    assert question(sent("all-gather", ranks=4), 0.1).nbytes == 1365
    assert question(sent("all-reduce", ranks=4), 0.1).nbytes == 683


def test_rounds_that_others_disturbed_count_only_where_there_are_no_others() -> None:
    quiet, disturbed = Round(1.0, 1.0), Round(5.0, 0.5)
    assert typical([[quiet, disturbed], [quiet, quiet]]) == 1.0
    assert typical([[disturbed], [quiet]]) == 3.0
    assert waits.LEAST > disturbed.share
