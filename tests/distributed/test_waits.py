"""What tensor ranks spend in collectives, measured among processes that compute between."""

from __future__ import annotations

import pytest
import torch

from parcompiler.bench import busy, local
from parcompiler.bench.local import (
    LocalBench,
    Round,
    WaitQuery,
    query_of,
    rounds_of,
    typical,
    wait_of,
)
from parcompiler.cost.operation import Operation
from parcompiler.errors import LaunchError

ACTIONS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "rotation")


def sent(action: str, nbytes: float = 1024.0, ranks: int = 2) -> Operation:
    return Operation(action, "exchange", 0.0, nbytes, torch.float32, ranks)


@pytest.mark.parametrize("action", ACTIONS)
def test_every_collective_is_measured_among_processes(action: str) -> None:
    first, other = rounds_of(query_of(sent(action), 0.0), seconds=0.001)
    assert len(first) == len(other) == busy.FEWEST
    assert all(one.wait > 0 and one.share > 0 for one in first + other)


@pytest.mark.parametrize("dtype", ["int64", "bfloat16", "bool"])
def test_values_of_any_kind_are_gathered(dtype: str) -> None:
    rounds = rounds_of(WaitQuery("all-gather", 100, dtype, 2, 1e-4), seconds=0.001)
    assert all(one.wait > 0 for rank in rounds for one in rank)


def test_a_failure_of_a_process_is_told() -> None:
    with pytest.raises(LaunchError, match="KeyError: 'hop'"):
        rounds_of(WaitQuery("hop", 1024, "float32", 2, 1e-4))


def test_what_was_asked_once_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[WaitQuery] = []

    def noted(one: WaitQuery) -> float:
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
    between = [query_of(sent("all-reduce"), s).between for s in (0.0, 0.003, 0.005, 99.0)]
    assert between == [2.0**-13, 2.0**-8, 2.0**-8, 0.25]


def test_the_whole_value_is_what_is_asked_about() -> None:
    assert query_of(sent("all-gather", ranks=4), 0.1).nbytes == 1365
    assert query_of(sent("all-reduce", ranks=4), 0.1).nbytes == 683


QUIET, DISTURBED = Round(1.0, 1.0), Round(5.0, 0.5)


def test_rounds_that_others_disturbed_do_not_count() -> None:
    six = [QUIET] * local.ENOUGH
    assert typical([[*six, DISTURBED], [*six, QUIET]]) == 1.0
    assert typical([[QUIET] * 40, [*[QUIET] * 39, Round(9.0, 1.0)]]) == 1.0  # the longest
    assert typical([six, [DISTURBED, *six[1:]]]) is None


def test_where_others_use_the_cores_the_model_says_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries: list[WaitQuery] = []

    def rounds(asked: WaitQuery) -> list[list[Round]]:
        tries.append(asked)
        return [[DISTURBED] * 12] * 2

    monkeypatch.setattr(local, "cores", lambda: 2)
    monkeypatch.setattr(local, "rounds_of", rounds)
    bench = LocalBench(torch.device("cpu"))
    for _ in "ab":
        assert bench.exchanged([sent("all-reduce")], 0.1) is None
    assert len(tries) == local.TRIES
    assert [record.message for record in caplog.records] == [
        "others use the cores: the time of an all-reduce is the cost model's"
    ]
    monkeypatch.setattr(local, "rounds_of", lambda asked: [[QUIET] * 12] * 2)
    assert wait_of(query_of(sent("all-reduce"), 0.1)) == 1.0
