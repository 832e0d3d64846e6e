"""Measures the machine that it runs on, and writes a device file.

operators alone        rank 0      products, attention, convolutions, copies, small operators
messages               all ranks   when torchrun started several
      │ each kept as it comes, beside the output
      ▼
fit: overhead, peaks, fractions by size, links  ──►  device.json
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path

import torch

from parcompiler.calibrate.bar import Step, bar
from parcompiler.calibrate.catalogue import Ladder, ladders
from parcompiler.calibrate.exchange import Exchange, Exchanged, exchanges, measure_exchanges
from parcompiler.calibrate.fit import Measured, fit
from parcompiler.calibrate.journal import Journal
from parcompiler.calibrate.machine import Machine, find_machine
from parcompiler.calibrate.request import Request, checked
from parcompiler.calibrate.timing import seconds_of
from parcompiler.calibrate.work import Work
from parcompiler.device import Device
from parcompiler.errors import InputError

LARGEST = 1 / 8  # of the memory: operands of a work
PATIENCE = 3  # times the seconds of a measurement: one call


def calibrate(
    output: str | PathLike[str],
    *,
    name: str | None = None,
    like: str | PathLike[str] | Device | None = None,
    dtypes: Sequence[str] | None = None,
    threads: int = 1,
    seconds: float = 0.2,
    sizes: int | None = None,
    fresh: bool = False,
    progress: bool = True,
) -> Device | None:
    """Measure this machine, write its device file to `output`, and return the device.

    Started by torchrun, every rank calls this: links and collectives are measured as well, the rank
    0 writes, the others return None. `name` is the device's name, `like` the device (a name, a path
    or a `Device`) whose figures stand for what is not measured; `dtypes` are names such as
    "bfloat16". On a CPU, operators run with `threads` threads: as many as a rank will have. Each
    measurement takes about `seconds` s; at most `sizes` sizes of each kind are measured, the
    smallest, or all whose calls take less than three times that time.

    Measurements are kept beside the output (`<output>.measurements.jsonl`): an interrupted run goes
    on where it was, a second run on the same machine reuses them; `fresh` starts over. Raises
    InputError, before anything is measured, for what it cannot do.
    """
    with _threads(threads):
        machine = find_machine()
        request = checked(machine, output, name, like, dtypes, seconds)
        if sizes is not None and (isinstance(sizes, bool) or sizes < 1):
            message = f"the number of sizes must be at least 1 ({sizes!r} given)"
            raise InputError(message)
        messages = list(exchanges(machine, sizes)) if machine.ranks > 1 else []
        climbs = list(ladders(request.dtypes, sizes)) if machine.rank == 0 else []
        measured, exchanged = _measure(request, machine, climbs, messages, fresh, progress)
    if machine.rank > 0:
        return None
    device = fit(measured, exchanged, machine, request.name, request.like, request.nominal)
    _write(request.output, device.to_json())
    return device


def _measure(
    request: Request,
    machine: Machine,
    climbs: Sequence[Ladder],
    messages: Sequence[Exchange],
    fresh: bool,
    progress: bool,
) -> tuple[list[Measured], Exchanged]:
    """Messages first, so that the other ranks are done and gone when rank 0 measures alone."""
    first = machine.rank == 0
    fabric = Journal(request.journal, machine.fabric, fresh=fresh) if first else None
    journal = Journal(request.journal, machine.label) if first else None
    total = len(messages) + sum(len(ladder.rungs) for ladder in climbs)
    measured: list[Measured] = []
    exchanged = Exchanged()
    with _kept(request.journal), bar(total, progress and first) as step:
        if messages:
            exchanged = measure_exchanges(messages, machine, fabric, request.seconds, step)
        done = len(messages)
        for ladder in climbs:
            assert journal is not None, "rank 0 has a journal"
            measured += climb(ladder, machine, journal, request.seconds, _after(done, step))
            done += len(ladder.rungs)
    return measured, exchanged


def climb(
    ladder: Ladder, machine: Machine, journal: Journal, seconds: float, step: Step
) -> Iterator[Measured]:
    """Time the works of a ladder, from the smallest; what is in the journal is taken from there.

    The ladder ends where one call would take, by the work below, too many times the `seconds` of a
    measurement, or where the operands would fill the memory.
    """
    before: Measured | None = None
    for number, work in enumerate(ladder.rungs):
        step(number, work.key)
        counted = work.counted()
        if work.nbytes > LARGEST * machine.memory:
            return
        if before is not None:
            growth = counted.flops / max(before.counted.flops, 1.0)
            if before.seconds * growth > PATIENCE * seconds:
                return
        took = journal.get(work.key)
        if took is None:
            took = _seconds(work, machine, seconds)
            journal.add(work.key, took)
        before = Measured(work, counted, took)
        yield before


def _seconds(work: Work, machine: Machine, budget: float) -> float:
    operands = work.tensors(machine.device)
    with torch.set_grad_enabled(work.gradients):
        return seconds_of(lambda: work.call(operands), budget, machine.synchronize, machine.clock)


def _after(done: int, step: Step) -> Step:
    """Counts on from what is done."""

    def shown(number: int, key: str) -> None:
        step(done + number, key)

    return shown


@contextmanager
def _threads(number: int) -> Iterator[None]:
    """Run with so many threads. Raises InputError for what is no number of threads."""
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        message = f"the number of threads must be at least 1 ({number!r} given)"
        raise InputError(message)
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _kept(journal: Path) -> Iterator[None]:
    """Say of an interruption what is kept."""
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        error.add_note(f"what was measured is kept in {journal}: run again to go on")
        raise


def _write(path: Path, text: str) -> None:
    """Write a file that is either the old one or the new one, whenever the machine stops."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8", newline="\n")
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        message = f"cannot write {path} ({error})"
        raise InputError(message) from error
