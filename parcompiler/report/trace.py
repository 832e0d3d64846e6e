"""The simulated and the measured step as a Chrome trace, which Perfetto shows: a process per rank.

    rank 0   compute   ▇F0▇▇F1▇        ▇▇B0▇▇
             to 1           ▇x▇ ─┐                a slice per message, on a track per link
             memory    ▁▂▃▃▃▃▃▃▂▁│
    rank 1   compute             │  ▇F0▇▇▇B0▇▇
             from 0         ▇x▇ ◄┘                the same message, and an arrow between the two
    rank 0, measured ...                          recorded instructions, if there are any

The format is that of "Trace Event Format" (Google, 2016): times in microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from parcompiler.instruction import COMPUTE, EMBEDDING, GROUP, HEAD, MESSAGES, Instruction, Kind
from parcompiler.report.data import ReportData
from parcompiler.report.events import StepEvent
from parcompiler.report.names import clean
from parcompiler.schedules.action import LETTERS

Record = dict[str, Any]

COMPUTE_TRACK = "compute"


def trace_text(report: ReportData) -> str:
    """The trace as JSON, one event a line."""
    ranks = range(len(report.ranks))
    tracks = [
        COMPUTE_TRACK,
        *(f"to rank {rank}" for rank in ranks),
        *(f"from rank {rank}" for rank in ranks),
        "gradients",
        "vocabulary",
        "parameters",
    ]
    step = report.measurement
    processes = {rank: f"rank {rank}" for rank in ranks}
    if step is not None and step.events:
        processes |= {len(ranks) + rank: f"rank {rank}, measured" for rank in ranks}
    records = [
        *(record for number, event in enumerate(report.trail.events)
          for record in _simulated(event, number, bool(report.averaged))),
        *(
            _where(rank, COMPUTE_TRACK, level.second)
            | {"ph": "C", "name": "memory", "args": {"bytes": level.nbytes}}
            for rank, levels in enumerate(report.trail.memory)
            for level in levels
        ),
        *(_measured(event, len(ranks)) for event in (step.events if step else ())),
    ]  # fmt: skip
    records = [*_names(processes, tracks, records), *records]
    numbered = (record | {"tid": tracks.index(record["tid"])} for record in records)
    lines = ",\n".join(json.dumps(record, sort_keys=True) for record in numbered)
    return f'{{"displayTimeUnit": "ns", "traceEvents": [\n{lines}\n]}}\n'


def _names(processes: dict[int, str], tracks: list[str], records: list[Record]) -> Iterator[Record]:
    """The names of processes and of used tracks, and their order."""
    used = {(record["pid"], record["tid"]) for record in records}
    for process, name in processes.items():
        meta = {"ph": "M", "ts": 0, "pid": process, "tid": COMPUTE_TRACK}
        yield meta | {"name": "process_name", "args": {"name": name}}
        yield meta | {"name": "process_sort_index", "args": {"sort_index": process}}
        for track in tracks:
            if (process, track) in used or track == COMPUTE_TRACK:
                yield meta | {"tid": track, "name": "thread_name", "args": {"name": track}}


def _simulated(event: StepEvent, number: int, averaged: bool) -> Iterator[Record]:
    """An instruction of the simulated step; a message at both ends, with an arrow between.

    Sums of gradients run beside the compute if data replicas average them.
    """
    line = event.instruction
    if line.kind is not Kind.SEND:
        beside = line.kind in GROUP or line.kind in (Kind.UNSHARD, Kind.GATHER_PARAMETERS)
        beside = beside or (line.kind is Kind.REDUCE_GRADIENTS and averaged)
        yield _slice(event, event.rank, _track(line) if beside else COMPUTE_TRACK)
        return
    assert line.peer is not None
    ends = (
        (event.rank, f"to rank {line.peer}", {"ph": "s"}),
        (line.peer, f"from rank {event.rank}", {"ph": "f", "bp": "e"}),
    )
    for rank, track, phase in ends:
        yield _slice(event, rank, track)
        where = _where(rank, track, event.begin)
        yield {"cat": "message", "id": number, "name": "message", **where, **phase}


def _measured(event: StepEvent, ranks: int) -> Record:
    """A recorded instruction, in a process after those of the simulated step.

    A message is shown on the side that runs the instruction, with the time that starting it took.
    """
    record = _slice(event, ranks + event.rank, _track(event.instruction))
    record["args"]["waited"] = _micro(event.waited or 0.0)
    return record


def _track(line: Instruction) -> str:
    """The track of an instruction."""
    if line.kind in MESSAGES and line.peer is not None:
        return f"{'from' if line.kind is Kind.RECV else 'to'} rank {line.peer}"
    if line.kind in GROUP:
        return "vocabulary"
    if line.kind in (Kind.UNSHARD, Kind.GATHER_PARAMETERS):
        return "parameters"
    return "gradients" if line.kind is Kind.REDUCE_GRADIENTS else COMPUTE_TRACK


def _slice(event: StepEvent, rank: int, track: str) -> Record:
    """An instruction on a track, from its begin to its end."""
    line = event.instruction
    return _where(rank, track, event.begin) | {
        "ph": "X",
        "dur": round(_micro(event.end) - _micro(event.begin), 3),
        "name": _title(line),
        "cat": line.kind.value.lower(),
        "args": {"instruction": clean(event.text)},
    }


def _title(line: Instruction) -> str:
    """The label of a slice."""
    gradient = ".grad" if line.gradient else ""
    match line.kind:
        case kind if kind in COMPUTE:
            return f"{LETTERS[kind]}{line.microbatch} of stage {line.stage}"
        case kind if kind in HEAD:
            return f"{LETTERS[kind]}{line.microbatch}"
        case kind if kind in EMBEDDING | GROUP:
            return clean(f"{kind} {line.value}{gradient} {line.microbatch}")
        case Kind.SEND | Kind.RECV:
            return clean(f"{line.value}{gradient} {line.microbatch}")
        case Kind.UNSHARD | Kind.RESHARD:
            return f"{line.kind} {line.microbatch} of stage {line.stage}"
        case Kind.REDUCE_GRADIENTS | Kind.GATHER_PARAMETERS:
            return clean(f"{line.kind} {line.value}")
        case _:
            return line.kind.value


def _where(rank: int, track: str, second: float) -> Record:
    return {"pid": rank, "tid": track, "ts": _micro(second)}


def _micro(seconds: float) -> float:
    """Seconds in microseconds, to the nanosecond."""
    return round(seconds * 1e6, 3)
