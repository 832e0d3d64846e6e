"""Measures the machine that it runs on, and writes a device file.

operators alone        rank 0      products, attention, convolutions, copies, small operators
messages               all ranks   when torchrun started several
      │ each saved at once, beside the output
      ▼
fit: overhead, peaks, fractions by size, links  ──►  device.json
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from parcompiler import temporary
from parcompiler.calibrate.catalogue import Ladder, ladders
from parcompiler.calibrate.exchange import (
    ExchangeTimes,
    RankExchange,
    Step,
    exchanges,
    measure_exchanges,
)
from parcompiler.calibrate.fit import WorkTime, fit
from parcompiler.calibrate.journal import Journal
from parcompiler.calibrate.machine import GIGA, Machine, find_machine
from parcompiler.calibrate.work import seconds_of
from parcompiler.device import Device, device, names
from parcompiler.documents import check_writable, write
from parcompiler.errors import InputError
from parcompiler.mesh import positive

DTYPES = ("float32", "float64", "bfloat16")
CUDA_DTYPES = (*DTYPES, "float16")  # a CPU has no kernels for it and would take minutes
LARGEST = 1 / 8  # of the memory, for the operands of a workload
PATIENCE = 3  # times the seconds of a measurement: limit of one call


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
    or a `Device`) whose figures are used for what is not measured; `dtypes` are names such as
    "bfloat16". On a CPU, operators run with `threads` threads: as many as a rank will have. Each
    measurement takes about `seconds` s; at most the `sizes` smallest sizes of each kind are
    measured, or all whose calls take less than three times that time.

    Measurements are kept beside the output (`<output>.measurements.jsonl`): an interrupted run
    continues from them, a second run on the same machine reuses them; `fresh` starts over. Raises
    InputError, before anything is measured, for impossible requests.
    """
    positive("the number of threads", threads)
    with temporary.threads(threads):
        machine = find_machine()
        request = checked(machine, output, name, like, dtypes, seconds)
        if sizes is not None:
            positive("the number of sizes", sizes)
        messages = list(exchanges(machine, sizes)) if machine.ranks > 1 else []
        climbs = list(ladders(request.dtypes, sizes)) if machine.rank == 0 else []
        measured, exchanged = _measure(request, machine, climbs, messages, fresh, progress)
    if machine.rank > 0:
        return None
    device = fit(measured, exchanged, machine, request.name, request.like, request.nominal)
    try:
        write(request.output, device.to_json())
    except OSError as error:
        message = f"cannot write {request.output} ({error})"
        raise InputError(message) from error
    return device


def _measure(
    request: CalibrationRequest,
    machine: Machine,
    climbs: Sequence[Ladder],
    messages: Sequence[RankExchange],
    fresh: bool,
    progress: bool,
) -> tuple[list[WorkTime], ExchangeTimes]:
    """Measure messages first, so that the other ranks have ended when rank 0 measures alone."""
    first = machine.rank == 0
    fabric = Journal(request.journal, machine.fabric, fresh=fresh) if first else None
    journal = Journal(request.journal, machine.label) if first else None
    total = len(messages) + sum(map(len, climbs))
    measured: list[WorkTime] = []
    exchanged = ExchangeTimes()
    try:
        with _bar(total, progress and first) as step:
            if messages:
                exchanged = measure_exchanges(messages, machine, fabric, request.seconds, step)
            done = len(messages)
            for ladder in climbs:
                assert journal is not None, "rank 0 has a journal"
                measured += _climb(ladder, machine, journal, request.seconds, step, done)
                done += len(ladder)
    except (Exception, KeyboardInterrupt) as error:
        error.add_note(f"what was measured is kept in {request.journal}: run again to go on")
        raise
    return measured, exchanged


def _climb(
    ladder: Ladder, machine: Machine, journal: Journal, budget: float, step: Step, done: int
) -> Iterator[WorkTime]:
    """Time the workloads of a ladder, from the smallest on, or take their times from the journal.

    The ladder ends when one call, extrapolated from the previous size, would take more than
    `PATIENCE` times the `budget` of a measurement (s), or when the operands would fill the memory.
    """
    before: WorkTime | None = None
    for number, work in enumerate(ladder, done):
        step(number, work.key)
        counted = work.counted()
        if work.nbytes > LARGEST * machine.memory:
            return
        if before is not None:
            growth = counted.flops / max(before.counted.flops, 1.0)
            if before.seconds * growth > PATIENCE * budget:
                return
        seconds = journal.get(work.key)
        if seconds is None:
            operands = work.tensors(machine.device)
            with torch.set_grad_enabled(work.gradients):
                call, times = machine.repeated(partial(work.call, operands))
                seconds = seconds_of(call, budget, machine.synchronize, machine.clock) / times
            journal.add(work.key, seconds)
        before = WorkTime(work, counted, seconds)
        yield before


@contextmanager
def _bar(total: int, wanted: bool) -> Iterator[Step]:
    """Show on stderr how many of `total` works are done, if it is a terminal."""
    if not (wanted and sys.stderr.isatty()):
        yield lambda done, next_work: None
        return
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
    )
    # leave standard output to the program, as it may go into a pipe
    with Progress(*columns, console=Console(stderr=True), redirect_stdout=False) as shown:
        task = shown.add_task("", total=total)
        yield lambda done, next_work: shown.update(task, completed=done, description=next_work)


@dataclass(frozen=True, slots=True)
class CalibrationRequest:
    """The output, the device that it describes, and the dtypes and seconds of measurements."""

    output: Path
    name: str
    like: Device
    nominal: bool
    dtypes: tuple[torch.dtype, ...]
    seconds: float

    @property
    def journal(self) -> Path:
        """The file of the measurements, beside the output."""
        return self.output.with_name(f"{self.output.name}.measurements.jsonl")


def checked(
    machine: Machine,
    output: str | PathLike[str],
    name: str | None,
    like: str | PathLike[str] | Device | None,
    dtypes: Sequence[str] | None,
    seconds: float,
) -> CalibrationRequest:
    """The complete request. Raises InputError for impossible ones."""
    known = recognized(machine)
    basis = _basis(machine, known, like)
    number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not number or not 0 < seconds < math.inf:
        message = f"the seconds of a measurement must be a number above 0 ({seconds!r} given)"
        raise InputError(message)
    if machine.rank == 0:  # only rank 0 writes
        check_writable(Path(output))
    return CalibrationRequest(
        output=Path(output),
        name=_named(machine, name, known),
        like=basis,
        nominal=known is not None and basis.name == known,
        dtypes=_dtypes(machine, dtypes),
        seconds=float(seconds),
    )


def recognized(machine: Machine) -> str | None:
    """The name of a GPU in the catalogue, from its name in the driver; None for all others.

    The catalogue has boards with NVLink: PCIe cards with the same chip do not count.
    """
    if machine.kind != "cuda" or re.search(r"\b(PCIE|NVL)\b", machine.model, re.IGNORECASE):
        return None
    if re.search(r"\bA100\b", machine.model):
        return "a100-80g" if machine.memory > 60 * GIGA else "a100-40g"
    for name in names():
        if re.search(rf"\b{re.escape(name)}\b", machine.model, re.IGNORECASE):
            return name
    return None


def _basis(
    machine: Machine, known: str | None, like: str | PathLike[str] | Device | None
) -> Device:
    """The device whose figures are used for those that are not measured."""
    if like is None:
        like = "cpu" if machine.kind == "cpu" else known
    if like is None:
        message = (
            f"{machine.model!r} is not in the catalogue: say with like= which device (--like "
            "on the command line) has links and other figures that are not measured like its own "
            f"(known: {', '.join(names())})"
        )
        raise InputError(message)
    if isinstance(like, Device):
        return like
    path = os.fspath(like)
    return Device.load(path) if path.endswith(".json") else device(path)


def _named(machine: Machine, name: str | None, known: str | None) -> str:
    """The name in the file. The runtime takes "cpu" and names that begin with "cpu-" for a CPU."""
    if name is None:
        gpu = re.sub(r"[^a-z0-9]+", "-", machine.model.lower()).strip("-")
        return "cpu-measured" if machine.kind == "cpu" else f"{known or gpu}-measured"
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        message = f"a device's name has letters, digits, '.', '_' and '-' ({name!r} given)"
        raise InputError(message)
    on_cpu = name == "cpu" or name.startswith("cpu-")
    if on_cpu != (machine.kind == "cpu"):
        wanted = "begin with 'cpu-'" if machine.kind == "cpu" else "not be that of a CPU"
        message = f"the name of this device must {wanted} ({name!r} given): plans run by it"
        raise InputError(message)
    if name in names():
        message = f"the catalogue has a device {name!r} already: choose another name"
        raise InputError(message)
    return name


def _dtypes(machine: Machine, wanted: Sequence[str] | None) -> tuple[torch.dtype, ...]:
    """The dtypes of these names; by default all that the device supports well.

    Other dtypes fall back to float32, in which overheads are measured too.
    """
    if wanted is None:
        wanted = DTYPES if machine.kind == "cpu" else CUDA_DTYPES
    dtypes = []
    for name in wanted:
        dtype = getattr(torch, name, None) if isinstance(name, str) else None
        if isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize >= 2:
            dtypes.append(dtype)
        else:
            message = f"calibrate measures {', '.join(CUDA_DTYPES)} ({name!r} given)"
            raise InputError(message)
    if torch.float32 not in dtypes:
        dtypes.insert(0, torch.float32)
    return tuple(dict.fromkeys(dtypes))
