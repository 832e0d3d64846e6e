"""The arguments of `calibrate`, checked before anything starts."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import torch

from parcompiler.calibrate.machine import GIGA, Machine
from parcompiler.device import Device, device, names
from parcompiler.documents import check_writable
from parcompiler.errors import InputError

DTYPES = ("float32", "float64", "bfloat16")
CUDA_DTYPES = (*DTYPES, "float16")  # a CPU has no kernels for it and would take minutes


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
        """Where the measurements are kept, beside the output."""
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
    if machine.rank == 0:  # the one that writes
        check_writable(Path(output))
    return CalibrationRequest(
        output=Path(output),
        name=_named(machine, name, known),
        like=basis,
        nominal=known is not None and basis.name == known,
        dtypes=_dtypes(machine, dtypes),
        seconds=float(seconds),
    )


def at_least_one(what: str, number: int) -> None:
    """Raise InputError for what is no number of `what`."""
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        message = f"the number of {what} must be at least 1 ({number!r} given)"
        raise InputError(message)


def recognized(machine: Machine) -> str | None:
    """The name of a GPU in the catalogue, from what its driver calls it; None for all others.

    The catalogue has boards with NVLink: cards of the same chip for PCIe are others.
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
    """The device whose figures stand for those that are not measured."""
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
    """The name in the file. The runtime takes "cpu" and what begins with "cpu-" for a CPU."""
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
    """The dtypes of those names; all that the device is made for where none are given.

    Other dtypes fall back to float32, and overheads are measured in it.
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
