"""A failure of one rank stops all ranks within seconds, and all say which rank, where and why.

    main    training step ── RECV h mb 2 from 1 ─ ─ ─ ─ ─ ─ ─ > "... because rank 1 is gone"
    watch   · [1] · [1] ·     · [2] ·        [3] ·   abort ───┘
    store   rank/0 rank/1 ...   alarm            cause

Each rank has a thread that watches over it, the only one that talks to the store of the run.
[1] About once a second it publishes the status of its rank, and compares its calls with those of
the next rank: calls of a worker are collective. [2] When a rank loses a connection, or waits longer
than the user's timeout, it raises the alarm: all answer where they are, and a rank that neither
answers nor keeps its connections is gone. [3] That, or an exception on some rank, is the cause:
each watch writes the last instructions of its rank to a file (`flight.py`), and aborts its groups,
so that the main thread returns from its wait, and raises the cause.
"""

from __future__ import annotations

import atexit
import json
import re
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Protocol

import torch.distributed as dist
from torch import nn

from parcompiler.errors import LaunchError, ParcompilerError
from parcompiler.runtime.flight import STILL, FlightRecorder, Position, clock
from parcompiler.runtime.program import RankProgram

INTERVAL = 1.0  # s between two reads of the store, for up to `CROWD` ranks
CROWD = 2000
REMEMBERED = 4096  # calls kept to compare with those of the next rank, which arrive later
SHOWN = 8  # calls that a published status has
_ALARM, _CAUSE, _READ = "alarm", "cause", "read"  # keys of the store
_LATE, _BROKEN = "waited too long", "lost its connection"
NAMED = 8  # ranks of a kind that a cause names
_SAME = "every rank must make the same calls in the same order"


@dataclass(frozen=True, slots=True)
class Status:
    """The status of a rank.

    `calls` are the last ones begun, by number from 1; the rank is `inside` the last one, at
    `position`, or after it. `answers` says that it has heard the alarm, `lost` how it lost a
    connection or waited too long, `left` why it makes no more calls, and `told` is when the status
    was published, in seconds of the epoch.
    """

    calls: Mapping[int, str]
    inside: bool
    position: Position
    answers: bool = False
    lost: str = ""
    left: str = ""
    told: float = 0.0

    @classmethod
    def read(cls, text: bytes) -> Status:
        """The status that another rank published."""
        fields = json.loads(text)
        calls = {int(number): name for number, name in fields.pop("calls").items()}
        return cls(calls, position=Position(**fields.pop("position")), **fields)

    @property
    def count(self) -> int:
        """How many calls it has begun."""
        return max(self.calls, default=0)

    @property
    def last(self) -> str:
        """The last call."""
        return f"call {self.count} ({self.calls[self.count]})" if self.calls else "its start"

    @property
    def waits(self) -> bool:
        """Whether it waits for other ranks."""
        return self.inside and self.position.waits

    def __str__(self) -> str:
        where = f"in {self.last}," if self.inside else f"idle after {self.last}"
        return f"{where} {replace(self.position, waits=self.waits)}"


class DifferentCallsError(RuntimeError):
    """Ranks have met in different calls."""

    def __str__(self) -> str:
        return f"ranks make different calls: {_SAME}"


class Connections(Protocol):
    """The process groups of a rank."""

    def abort(self) -> None:
        """Make every wait on them fail at once; any thread may call it."""
        ...

    def closed(self) -> set[int]:
        """The ranks that have closed their connections to this one, as far as the backend tells."""
        ...


class Watch:
    """The thread that watches over one rank; there is none without a store or other ranks.

    `connections` are those of the rank, and `flight` knows where it is in its instructions. `host`
    runs the store: "rank 0", or a server that outlives all ranks. A rank waits for others for at
    most `timeout` seconds.
    """

    def __init__(
        self,
        store: dist.Store | None,
        program: RankProgram,
        connections: Connections,
        flight: FlightRecorder,
        host: str,
        timeout: float,
    ) -> None:
        self.cause = ""  # why all ranks stop
        self.written: Path | None = None  # the last instructions of this rank
        self._rank, self._size = program.rank, program.size
        self._connections = connections
        self._flight = flight
        self._host, self._timeout = host, timeout
        self._interval = INTERVAL * max(1.0, self._size / CROWD)
        self._patience = 2 * self._interval + 1.0  # s to wait for ranks that do not answer
        self._calls: deque[tuple[int, str]] = deque(maxlen=REMEMBERED)
        self._inside = False
        self._failed = ""  # why this rank stops
        self._lost = ""  # how this rank lost a connection
        self._left = ""  # why this rank makes no more calls
        self._alarmed = 0.0  # when this watch heard the alarm
        self._takes = False  # this rank takes the roll call
        self._missing = 0  # ranks that do not read the cause
        self._looked = time.monotonic()  # when the last `_look` began
        self._wake, self._settled = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        if store is not None and self._size > 1:
            # Its own client: while one waits, all calls of that client wait. (The stubs lack it.)
            self._store: dist.Store = store.clone()  # type: ignore[attr-defined]
            self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
            self._thread.start()
            atexit.register(self._exit)

    # Called by the main thread.

    def begin(self, call: str) -> None:
        """The rank begins a call that all ranks make, or without a name continues the last one. A
        change of call is published at once."""
        self._inside = True
        number, before = self._calls[-1] if self._calls else (0, "")
        if call:
            number += 1
            self._calls.append((number, call))
        self._flight.call(f"call {number} ({call or before})" if number else "its start")
        if call not in ("", before):
            self._wake.set()

    def end(self) -> None:
        """The call is over."""
        self._inside = False
        self._flight.note("idle")

    def fail(self, text: str) -> None:
        """Tell the others why this rank stops; the first cause of a run stays."""
        self._failed = text
        self._settle()

    def lose(self, text: str) -> str:
        """Report that this rank has lost a connection. Returns why all ranks stop: `text` if
        unknown."""
        self._lost = text
        self._settle()
        return self.cause or text

    def leave(self, reason: str = "its worker was closed") -> None:
        """Tell the others that this rank makes no more calls."""
        self._left = reason
        self._settle()

    def close(self) -> None:
        """End the thread; a rank that has the store waits for those that read it."""
        atexit.unregister(self._exit)
        if self._thread is not None:
            self._thread.join(self._patience)

    def _settle(self) -> None:
        """Wake the thread, and wait until it has told the others; then it ends."""
        if self._thread is None or not self._thread.is_alive():  # it is not in a fork
            return
        self._wake.set()
        end = time.monotonic() + 2 * self._patience + 2
        while not self._settled.wait(self._interval / 10) and time.monotonic() < end:
            if time.monotonic() > self._looked + 2 * self._patience:  # the store does not answer
                silent = f"{self._host}, which has the store of this run, is silent"
                self.cause = self.cause or silent
                self.written = self._flight.write(self._rank, self.cause)
                return

    def _exit(self) -> None:
        """At exit: the process ends without having closed its worker."""
        error = getattr(sys, "last_value", None)
        last = "" if error is None else f", its last error was {named(error)}"
        self.leave(f"its process ended{last}")
        self.close()

    # Run by the thread.

    def _run(self) -> None:
        """Body of the thread: look until there is a cause or the rank leaves."""
        try:
            while True:
                leaving = self._left
                self._look()
                if self.cause or leaving:
                    break
                self._wake.wait(self._interval / 10 if self._alarmed else self._interval)
                self._wake.clear()
            self._store.add(_READ, 1)
            self._settled.set()
            self._stay()
        except (RuntimeError, ConnectionError):  # the store ended with its host
            if not self.cause:
                self.cause = f"{self._host} is gone, and with it the store of this run"
                self.written = self._flight.write(self._rank, self.cause)
        finally:
            self._settled.set()

    def _look(self) -> None:
        """Publish the status of this rank, and read those that concern it."""
        self._looked = time.monotonic()
        if self._failed:
            self._stop(self._failed)
            return
        mine = self._status(SHOWN)
        if mine.waits and mine.position.seconds > self._timeout and not self._lost:
            self._lost = f"rank {self._rank} {_LATE} ({self._timeout:g} s): {mine}"
            mine = replace(mine, lost=self._lost)
        if self._lost and not self._alarmed:
            self._takes = self._first(_ALARM, str(self._rank)) == str(self._rank)
        alarm = self._store.check([_ALARM])
        if alarm and not self._alarmed:
            self._alarmed = time.monotonic()
            mine = self._status(SHOWN)
        self._store.set(f"rank/{self._rank}", json.dumps(asdict(mine)))
        if alarm and self._store.check([_CAUSE]):
            self._stop("")
        elif self._takes:
            self._call_roll()
        elif not alarm:
            self._compare(mine.left != "")
        elif mine.lost and self._waited(2 * self._patience):
            self._stop(mine.lost)  # the rank that takes the roll call is gone, too

    def _status(self, last: int) -> Status:
        """The status of this rank, with its `last` calls."""
        calls = dict(tuple(self._calls)[-last:])
        alarmed = self._alarmed > 0
        position = self._flight.position(STILL if alarmed else self._timeout / 2)
        lost, left = self._lost, self._left
        return Status(calls, self._inside, position, alarmed, lost, left, time.time())

    def _compare(self, leaving: bool) -> None:
        """Stop when the next rank makes other calls than this one, or no more. A rank that leaves
        also checks the one before it."""
        mine = self._status(REMEMBERED)
        for rank in {(self._rank + 1) % self._size, (self._rank - leaving) % self._size}:
            other = self._read(rank) if rank != self._rank else None
            if other is not None and (text := self._uneven(mine, rank, other)):
                self._stop(text)
                return

    def _uneven(self, mine: Status, rank: int, other: Status) -> str:
        """How the calls of another rank differ from those of this one; "" if they agree."""
        both = sorted(mine.calls.keys() & other.calls.keys())
        number = next((n for n in both if mine.calls[n] != other.calls[n]), None)
        if number is not None:
            made = sorted([(self._rank, mine.calls[number]), (rank, other.calls[number])])
            calls = " and ".join(f"{name} on rank {r}" for r, name in made)
            ranks = f"rank {self._rank} is {mine}; rank {rank} is {other}"
            return f"ranks make different calls (call {number} is {calls}): {_SAME}; {ranks}"
        if other.left and other.count < mine.count:
            left = f"rank {rank} left after {other.last} ({other.left})"
            return f"{left}, while rank {self._rank} is {mine}: {_SAME}"
        return ""

    def _call_roll(self) -> None:
        """Stop and name the lost ranks, once all others have answered or time is up."""
        others = {rank: self._read(rank) for rank in range(self._size) if rank != self._rank}
        missing = {r for r, s in others.items() if s is None or not (s.answers or s.left)}
        gone = missing & self._connections.closed()
        if not self._waited(self._patience if missing - gone else self._interval / 5):
            return
        known = {rank: status for rank, status in others.items() if status is not None}
        mine = self._status(REMEMBERED)
        uneven = [text for r, s in known.items() if (text := self._uneven(mine, r, s))]
        late = [s.lost for s in (mine, *known.values()) if _LATE in s.lost]
        if uneven:
            self._stop(uneven[0], len(missing))
        elif gone or (missing and not late):
            self._stop(_seen(gone or missing, known, is_gone=bool(gone)), len(gone or missing))
        elif late:
            self._stop(_where(late[0], {self._rank: mine, **known}, missing), len(missing))
        else:
            self._stop(mine.lost)

    def _stop(self, text: str, missing: int = 0) -> None:
        """Stop all ranks; `text` is the cause unless there is one. `missing` ranks will not read
        it."""
        number, _, self.cause = self._first(_CAUSE, f"{missing} {text}").partition(" ")
        self._missing = int(number)
        self._first(_ALARM, str(self._rank))
        self.written = self._flight.write(self._rank, self.cause)
        waits = self._inside and self._flight.position().waits
        if not (self._failed or waits):  # its thread may never come back to raise the cause
            print(f"rank {self._rank}: the run has failed: {self.cause}", file=sys.stderr)
        self._connections.abort()

    def _stay(self) -> None:
        """If this rank hosts the store, wait until the others have read the cause."""
        end = time.monotonic() + self._patience
        while self._host == f"rank {self._rank}" and time.monotonic() < end:
            if self._store.add(_READ, 0) >= self._size - self._missing:
                return
            time.sleep(self._interval / 50)

    def _waited(self, seconds: float) -> bool:
        """Whether the alarm was more than `seconds` ago."""
        return time.monotonic() > self._alarmed + seconds

    def _first(self, key: str, text: str) -> str:
        """Write a text under a key unless there is one. Returns the text that is there."""
        return bytes(self._store.compare_set(key, "", text)).decode()

    def _read(self, rank: int) -> Status | None:
        """The last status of a rank, if it has published one."""
        key = f"rank/{rank}"
        return Status.read(self._store.get(key)) if self._store.check([key]) else None


def _seen(ranks: Iterable[int], known: Mapping[int, Status], *, is_gone: bool) -> str:
    """Ranks that do not answer, and their last status."""
    each = []
    for rank in sorted(ranks):
        seen = known.get(rank)
        last = "it never started" if seen is None else f"last seen at {clock(seen.told)} {seen}"
        each.append(
            f"rank {rank} is gone, killed or ended by itself ({last})"
            if is_gone
            else f"rank {rank} is silent, stopped or in one long computation ({last})"
        )
    return " and ".join(each)


def _where(lost: str, known: Mapping[int, Status], missing: Collection[int]) -> str:
    """The text for a wait that is too long: where all ranks are, first those that do not wait."""
    busy = [f"rank {r} is {s}" for r, s in known.items() if r not in missing and not s.waits]
    waiting = [
        f"rank {r} is {s}"
        for r, s in known.items()
        if s.waits and r not in missing and s.lost != lost
    ]
    silent = [_seen(missing, known, is_gone=False)] if missing else []
    parts = [lost, *silent, *busy[:NAMED], *waiting[:NAMED]]
    more = max(len(busy) - NAMED, 0) + max(len(waiting) - NAMED, 0)
    return "; ".join([*parts, *([f"and {more} more"] if more else [])])


def explain(
    error: Exception, rank: int, place: str, stages: Iterable[nn.Module], watch: Watch
) -> Exception:
    """The exception that a rank raises for `error`, after telling the others.

    For a network error the watch knows which rank has failed; for different calls, which ones they
    are.
    """
    explained: Exception
    differ = isinstance(error, DifferentCallsError)
    if isinstance(error, RuntimeError) and (watch.cause or differ or _is_network(error)):
        late = "timed out" in str(error).lower()
        how = "stopped" if differ else _LATE if late else _BROKEN
        lost = f"rank {rank} {how} {place}: {_line(error)}"
        cause = watch.lose(lost)
        stopped = f"rank {rank} stopped {place} because {cause}"
        explained = LaunchError(lost if cause == lost else stopped)
    else:
        module = _module_of(error, stages)
        where = f"{place} in module {module!r}" if module else place
        failed = f"rank {rank} failed {where}: {named(error)}"
        watch.fail(failed)
        explained = error if isinstance(error, ParcompilerError) else LaunchError(failed)
    if watch.written is not None:
        explained.add_note(f"the last instructions of rank {rank} are in {watch.written}")
    return explained


def named(error: BaseException) -> str:
    """An error's type and the first line of its message."""
    return f"{type(error).__name__}: {_line(error)}"


def _is_network(error: Exception) -> bool:
    """Whether an error comes from torch.distributed rather than from computing."""
    text = str(error).lower()
    words = ("gloo", "nccl", "connection", "timed out", "socket", "peer", "process group", "pair")
    return isinstance(error, dist.DistError) or any(word in text for word in words)


def _line(error: BaseException) -> str:
    """The first line of an error's message, without the source file that gloo begins it with."""
    line = (str(error).strip().splitlines() or ["(no message)"])[0]
    return re.sub(r"^\[\S*gloo\S*\] ", "", line).partition(" This is typically")[0][:500]


def _module_of(error: Exception, stages: Iterable[nn.Module]) -> str:
    """The innermost module of a stage in the error's traceback, with file and line."""
    names = {id(m): name for stage in stages for name, m in stage.named_modules() if name}
    module = ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        owner = id(frame.f_locals.get("self"))
        if owner in names and "/torch/nn/modules/" not in frame.f_code.co_filename:
            module = f"{names[owner]} ({frame.f_code.co_filename}:{number})"
    return module
