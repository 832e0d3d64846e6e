"""The simulated and the measured step as a Chrome trace, which Perfetto shows: a process per rank.

    rank 0   compute   ▇F0▇▇F1▇        ▇▇B0▇▇
             to 1           ▇x▇ ─┐                a slice per message, on a track per link
             memory    ▁▂▃▃▃▃▃▃▂▁│
    rank 1   compute             │  ▇F0▇▇▇B0▇▇
             from 0         ▇x▇ ◄┘                the same message, and an arrow between the two
    rank 0, measured ...                          what was recorded, where it was

The format is that of "Trace Event Format" (Google, 2016): times in microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from parcompiler.instruction import (
    COMPUTE,
    EMBEDDING,
    HEAD,
    MESSAGES,
    TRANSFERS,
    Instruction,
    Kind,
)
from parcompiler.report.events import Event, Level, Ran
from parcompiler.report.names import clean
from parcompiler.schedules.action import LETTERS

if TYPE_CHECKING:
    from parcompiler.report.report import Report

Record = dict[str, Any]

COMPUTE_TRACK = 0
GROUP = TRANSFERS | {Kind.EXCHANGE}  # between all ranks, for the vocabulary


def trace_text(report: Report) -> str:
    """The trace as JSON, one event a line."""
    ranks = len(report.ranks)
    records = [record for rank in range(ranks) for record in _tracks(rank, ranks, f"rank {rank}")]
    for number, event in enumerate(report.trail.events):
        if event.kind is Kind.REDUCE_GRADIENTS and report.averaged:
            records.append(_slice(event, event.rank, _sums(ranks), _title(event.instruction)))
        else:
            records += _slices(event, number, ranks)
    for rank, levels in enumerate(report.trail.memory):
        records += (_counter(rank, level) for level in levels)
    if report.measurement is not None and report.measurement.events:
        records += _measured(report.measurement.events, ranks)
    lines = ",\n".join(json.dumps(record, sort_keys=True) for record in _used(records))
    return f'{{"displayTimeUnit": "ns", "traceEvents": [\n{lines}\n]}}\n'


def _track(peer: int, ranks: int, *, incoming: bool) -> int:
    """The number of a rank's track for the messages to or from a peer."""
    return 1 + peer + (ranks if incoming else 0)


def _sums(ranks: int) -> int:
    """The number of a rank's track for sums of gradients, which run beside its compute."""
    return 1 + 2 * ranks


def _spread(ranks: int) -> int:
    """The number of a rank's track for collectives of the vocabulary."""
    return 2 + 2 * ranks


def _tracks(rank: int, ranks: int, name: str) -> Iterator[Record]:
    """The names of a rank's process and tracks, and the order of the processes."""
    yield _name("process_name", rank, COMPUTE_TRACK, name)
    order = {"ph": "M", "ts": 0, "pid": rank, "tid": COMPUTE_TRACK, "name": "process_sort_index"}
    yield {**order, "args": {"sort_index": rank}}
    yield _name("thread_name", rank, COMPUTE_TRACK, "compute")
    yield _name("thread_name", rank, _sums(ranks), "gradients")
    yield _name("thread_name", rank, _spread(ranks), "vocabulary")
    for peer in range(ranks):
        yield _name("thread_name", rank, _track(peer, ranks, incoming=False), f"to rank {peer}")
        yield _name("thread_name", rank, _track(peer, ranks, incoming=True), f"from rank {peer}")


def _name(kind: str, rank: int, track: int, name: str) -> Record:
    return {"ph": "M", "ts": 0, "pid": rank, "tid": track, "name": kind, "args": {"name": name}}


def _used(records: list[Record]) -> Iterator[Record]:
    """The records without the names of tracks on which nothing happens."""
    used = {(item["pid"], item["tid"]) for item in records if item["ph"] != "M"}
    for item in records:
        if item["ph"] != "M" or (item["pid"], item["tid"]) in used or item["tid"] == COMPUTE_TRACK:
            yield item


def _measured(events: Sequence[Ran], ranks: int) -> Iterator[Record]:
    """What was recorded, in processes after those of the simulated step.

    A message is on the side that runs the instruction, and takes what starting it took there.
    """
    for rank in range(ranks):
        yield from _tracks(ranks + rank, ranks, f"rank {rank}, measured")
    for event in events:
        line, track = event.instruction, COMPUTE_TRACK
        if line.kind in MESSAGES and line.peer is not None:
            track = _track(line.peer, ranks, incoming=line.kind is Kind.RECV)
        elif line.kind in GROUP:
            track = _spread(ranks)
        elif line.kind is Kind.REDUCE_GRADIENTS:
            track = _sums(ranks)
        slice_ = _slice(event, ranks + event.rank, track, _title(line))
        slice_["args"]["waited"] = _micro(event.waited)
        yield slice_


def _slices(event: Event, number: int, ranks: int) -> Iterator[Record]:
    """An instruction; a message at both ends, with an arrow between."""
    line = event.instruction
    if line.kind is not Kind.SEND:
        track = _spread(ranks) if line.kind in GROUP else COMPUTE_TRACK
        yield _slice(event, event.rank, track, _title(line))
        return
    assert line.peer is not None
    ends = (
        (event.rank, _track(line.peer, ranks, incoming=False)),
        (line.peer, _track(event.rank, ranks, incoming=True)),
    )
    for (rank, track), phase in zip(ends, ({"ph": "s"}, {"ph": "f", "bp": "e"}), strict=True):
        yield _slice(event, rank, track, _title(line))
        where = {"pid": rank, "tid": track, "ts": _micro(event.begin)}
        yield {"cat": "message", "id": number, "name": "message", **where, **phase}


def _slice(event: Event | Ran, rank: int, track: int, name: str) -> Record:
    begin = _micro(event.begin)
    return {
        "ph": "X",
        "ts": begin,
        "dur": round(_micro(event.end) - begin, 3),
        "pid": rank,
        "tid": track,
        "name": name,
        "cat": event.instruction.kind.value.lower(),
        "args": {"instruction": clean(event.text)},
    }


def _title(line: Instruction) -> str:
    """What is written on a slice."""
    match line.kind:
        case kind if kind in COMPUTE:
            return f"{LETTERS[kind]}{line.microbatch} of stage {line.stage}"
        case kind if kind in HEAD:
            return f"{LETTERS[kind]}{line.microbatch}"
        case kind if kind in EMBEDDING | GROUP:
            gradient = ".grad" if line.gradient else ""
            return clean(f"{kind} {line.value}{gradient} {line.microbatch}")
        case Kind.SEND | Kind.RECV:
            gradient = ".grad" if line.gradient else ""
            return clean(f"{line.value}{gradient} {line.microbatch}")
        case Kind.REDUCE_GRADIENTS:
            return clean(f"{line.kind} {line.value}")
        case _:
            return line.kind.value


def _counter(rank: int, level: Level) -> Record:
    """The memory that a rank holds from now on."""
    where = {"pid": rank, "tid": COMPUTE_TRACK, "ts": _micro(level.second)}
    return {"ph": "C", "name": "memory", **where, "args": {"bytes": level.nbytes}}


def _micro(seconds: float) -> float:
    """Seconds in microseconds, to the nanosecond."""
    return round(seconds * 1e6, 3)
