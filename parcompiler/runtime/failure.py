"""One rank fails, all ranks stop within seconds and say which one, where and why.

The failing rank leaves a note in the store that all ranks share and closes its connections. The
others, whose receives then fail at once, read the note.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist
from torch import nn

from parcompiler.errors import LaunchError, ParcompilerError
from parcompiler.instruction import Instruction

_KEY = "parcompiler/failure"
_PATIENCE = timedelta(seconds=2)  # how long a rank looks for the note of another


class Notes:
    """The failure note in the store of this run; without a store there are no notes."""

    def __init__(self, store: dist.Store | None) -> None:
        self._store = store

    def leave(self, text: str) -> None:
        """Say why this rank stops; the first note of a run is the cause and stays."""
        if self._store is not None:
            try:
                self._store.compare_set(_KEY, "", text)
            except (RuntimeError, ConnectionError):  # the store died with its rank
                self._store = None

    def read(self) -> str | None:
        """The note of the rank that failed first, if there is one."""
        if self._store is None:
            return None
        try:
            self._store.wait([_KEY], _PATIENCE)
            return str(self._store.get(_KEY), "utf-8")
        except (RuntimeError, ConnectionError):
            return None


def explain(
    error: Exception,
    rank: int,
    instruction: Instruction | None,
    stages: Iterable[nn.Module],
    notes: Notes,
) -> Exception:
    """The exception that this rank raises for `error`, after telling the others.

    An error of the network is another rank's failure: its note says which.
    """
    place = "before the first instruction" if instruction is None else f"at '{instruction}'"
    if isinstance(error, dist.DistError | RuntimeError) and _is_network(error):
        cause = notes.read()
        if cause is not None:
            return LaunchError(f"rank {rank} stopped {place} because {cause}")
        lost = f"rank {rank} lost its connection {place}: {_first_line(error)}"
        notes.leave(lost)
        return LaunchError(lost)
    module = _module_of(error, stages)
    where = f"{place} in module {module!r}" if module else place
    notes.leave(f"rank {rank} failed {where}: {type(error).__name__}: {_first_line(error)}")
    if isinstance(error, ParcompilerError):
        return error
    return LaunchError(f"rank {rank} failed {where}: {type(error).__name__}: {_first_line(error)}")


def let_go(error: BaseException) -> None:
    """Let go of the process groups in the frames that an error has come through: while anything
    holds a group its connections stay open, and other ranks wait on them."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if any(word in frame.f_code.co_filename for word in ("distributed", "channels.py")):
            with suppress(RuntimeError):  # it still runs
                frame.clear()


def _is_network(error: Exception) -> bool:
    """Whether an error comes from torch.distributed rather than from computing."""
    text = str(error).lower()
    words = ("gloo", "nccl", "connection", "timed out", "socket", "peer", "process group")
    return isinstance(error, dist.DistError) or any(word in text for word in words)


def _first_line(error: Exception) -> str:
    """The first line of an error's message."""
    return (str(error).strip().splitlines() or ["(no message)"])[0][:500]


def _module_of(error: Exception, stages: Iterable[nn.Module]) -> str:
    """The innermost module of a stage in the error's traceback, with file and line."""
    names = {id(m): name for stage in stages for name, m in stage.named_modules() if name}
    found = ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        owner = id(frame.f_locals.get("self"))
        if owner in names and "/torch/nn/modules/" not in frame.f_code.co_filename:
            found = f"{names[owner]} ({frame.f_code.co_filename}:{number})"
    return found
