"""Watches find the cause for which all ranks stop, and never blame a rank that is well."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
import torch
import torch.distributed as dist

from parcompiler.errors import InputError, LaunchError
from parcompiler.runtime import failure
from parcompiler.runtime.collective_queue import Started, queue_on
from parcompiler.runtime.failure import Watch, explain
from parcompiler.runtime.flight import STILL, FlightRecorder
from parcompiler.runtime.program import RankProgram

SIZE, TIMEOUT = 3, 60.0
BROKEN = RuntimeError("[/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:2.")
LATE = RuntimeError("[/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 4000ms for recv")


class Groups:
    """The connections of a rank: `gone` have closed theirs."""

    def __init__(self, *gone: int) -> None:
        self.gone = set(gone)
        self.aborted = threading.Event()

    def abort(self) -> None:
        self.aborted.set()

    def closed(self) -> set[int]:
        return self.gone


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure, "INTERVAL", 0.05)


@contextmanager
def watches(*gone: int, absent: tuple[int, ...] = ()) -> Iterator[dict[int, Watch]]:
    """A watch for each rank that is not absent, and what it watches over at `line <rank>`."""
    store = dist.HashStore()
    with ExitStack() as stack:
        made = {}
        for rank in range(SIZE):
            program = RankProgram(rank, SIZE, "cpu", 1, "0", torch.float32, (), (), ())
            if rank not in absent:
                flight = FlightRecorder()
                made[rank] = Watch(store, program, Groups(*gone), flight, "its server", TIMEOUT)
                stack.callback(made[rank].close)
                stack.callback(made[rank].leave)
        yield made


def told(watch: Watch) -> str:
    """The cause, once the main thread would come back from its wait."""
    groups = watch._connections
    assert isinstance(groups, Groups)
    assert groups.aborted.wait(20)
    return watch.cause


def test_the_first_failure_is_the_cause_on_all_ranks() -> None:
    with watches() as ranks:
        ranks[1].fail("rank 1 failed")
        ranks[2].fail("rank 2 failed for that")
        assert {told(watch) for watch in ranks.values()} == {"rank 1 failed"}


@pytest.mark.parametrize("lost", [(0,), (0, 1)])
def test_who_neither_answers_nor_keeps_its_connections_is_gone(lost: tuple[int, ...]) -> None:
    with watches(2, absent=(2,)) as ranks:
        raised = [explain(BROKEN, r, f"at 'line {r}'", (), ranks[r]) for r in lost]
        for rank, error in zip(lost, raised, strict=True):
            assert str(error).startswith(
                f"rank {rank} stopped at 'line {rank}' because rank 2 is g"
            )
        assert told(ranks[1]).startswith("rank 2 is gone, killed or ended by itself")


def test_who_does_not_answer_but_keeps_its_connections_is_silent() -> None:
    with watches(absent=(2,)) as ranks:
        error = explain(LATE, 0, "at 'line 0'", (), ranks[0])
        assert "; rank 2 is silent, stopped or in one long computation" in str(error)
        assert "gone" not in str(error)


def test_a_busy_rank_is_not_blamed_for_one_that_is_gone() -> None:
    with watches(1, absent=(1, 2)) as ranks:
        start = time.monotonic()
        error = explain(BROKEN, 0, "at 'line 0'", (), ranks[0])
        assert "because rank 1 is gone" in str(error)
        assert "rank 2" not in str(error)
        assert time.monotonic() - start < 10


def test_where_all_answer_the_connection_is_what_was_lost() -> None:
    with watches() as ranks:
        error = explain(BROKEN, 0, "at 'line 0'", (), ranks[0])
        assert str(error) == (
            "rank 0 lost its connection at 'line 0': Connection closed by peer [::1]:2."
        )
        assert told(ranks[2]) == str(error)


def test_a_wait_that_is_too_long_names_who_does_nothing() -> None:
    with watches() as ranks:
        for rank in (0, 1):
            ranks[rank].begin("step")
        time.sleep(2 * STILL)  # then a thread may be looked at
        error = explain(LATE, 0, "at 'line 0'", (), ranks[0])
        assert "waited too long at 'line 0'" in str(error)
        assert re.search("; rank 2 is idle after its start since [0-9:]+, in ", str(error))


def test_calls_that_differ_are_found_while_ranks_wait() -> None:
    with watches() as ranks:
        for rank, second in enumerate(["step", "evaluate", "step"]):
            ranks[rank].begin("step")
            ranks[rank].end()
            ranks[rank].begin(second)
        for watch in ranks.values():
            assert "call 2 is " in told(watch)
            assert "evaluate on rank 1" in told(watch)
            assert re.search(r"; rank 1 is in call \d \((step|evaluate)\), since", told(watch))


def test_calls_that_are_behind_do_not_differ() -> None:
    with watches() as ranks:
        for rank, count in enumerate([12, 10, 11]):
            for _ in range(count):
                ranks[rank].begin("step")
                ranks[rank].end()
        time.sleep(0.5)
        assert not any(watch.cause for watch in ranks.values())


def test_a_rank_that_has_left_is_named_by_who_goes_on() -> None:
    with watches() as ranks:
        for watch in ranks.values():
            watch.begin("step")
            watch.end()
        ranks[1].leave()
        ranks[0].begin("step")
        text = told(ranks[0])
        assert text.startswith(
            "rank 1 left after call 1 (step) (its worker was closed), while rank 0 is in call 2 "
        )
        assert text.endswith(f": {failure._SAME}")


def test_what_is_found_when_ranks_leave_is_told() -> None:
    with watches() as ranks:
        for rank, call in enumerate(["step", "step", "evaluate"]):
            ranks[rank].begin(call)
            ranks[rank].end()
        for watch in ranks.values():
            watch.leave()
        assert "call 1 is" in "".join(watch.cause for watch in ranks.values())


def test_an_error_of_computing_is_the_rank_s_own() -> None:
    with watches() as ranks:
        error = explain(ValueError("boom"), 1, "at 'line 1'", (), ranks[1])
        assert isinstance(error, LaunchError)
        assert str(error) == "rank 1 failed at 'line 1': ValueError: boom"
        assert told(ranks[0]) == str(error)
        refused = InputError("a batch")
        assert explain(refused, 1, "", (), ranks[1]) is refused


def test_a_turn_that_fails_is_told_though_nobody_waits_for_it() -> None:
    told: list[Exception] = []
    begun: list[str] = []
    boom = ValueError("boom")

    def fail() -> Started:
        raise boom

    def begin() -> Started:
        begun.append("after")
        return None, None

    queue = queue_on(torch.device("cpu"), told.append)
    queue.put(fail)
    after = queue.put(begin)
    with pytest.raises(ValueError, match="boom"):
        after.wait()
    assert told == [boom]
    assert begun == []
    queue.close()


def test_without_a_store_nobody_is_asked() -> None:
    program = RankProgram(0, 2, "cpu", 1, "0", torch.float32, (), (), ())
    watch = Watch(None, program, Groups(), FlightRecorder(), "rank 0", TIMEOUT)
    assert str(explain(LATE, 0, "at 'line 0'", (), watch)).startswith("rank 0 waited too long")
    watch.leave()
    watch.close()
