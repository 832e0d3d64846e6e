"""How a process becomes a rank: torch.distributed is started from torchrun's environment."""

from __future__ import annotations

import os
from datetime import timedelta
from functools import cache
from itertools import count

import torch
import torch.distributed as dist

from parcompiler.errors import LaunchError
from parcompiler.runtime.device import backend_of
from parcompiler.runtime.program import RankProgram

_RUNS = count()  # of this process; every rank makes its workers in the same order


def start(program: RankProgram, device: torch.device, timeout: timedelta) -> dist.Store | None:
    """Start torch.distributed if needed; the store for failure notes if there is one."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if dist.is_initialized():
        _check_place(program, dist.get_rank(), dist.get_world_size())
        return None
    at = place()
    if at is not None:
        rank, size = at
        _check_place(program, rank, size)
        # Keys of an earlier run of this process, or of its failure, are not those of this one.
        store: dist.Store = dist.PrefixStore(f"parcompiler/{next(_RUNS)}", _rendezvous(_address()))
    elif program.size > 1:
        message = f"start this program with torchrun --nproc-per-node {program.size}"
        raise LaunchError(message)
    else:
        rank, size, store = 0, 1, dist.HashStore()
    dist.init_process_group(
        backend_of(device), store=store, rank=rank, world_size=size, timeout=timeout
    )
    return dist.PrefixStore("notes", store)


def place() -> tuple[int, int] | None:
    """This process's rank and the number of ranks, as torchrun says; None where it says nothing.

    Raises LaunchError when they are no numbers.
    """
    if "RANK" not in os.environ:
        return None
    rank, size = os.environ["RANK"], os.environ.get("WORLD_SIZE", "")
    if not (rank.isdecimal() and size.isdecimal()):
        message = (
            f"RANK and WORLD_SIZE must be numbers ({rank!r} and {size!r} in the environment): "
            "start this program with torchrun"
        )
        raise LaunchError(message)
    return int(rank), int(size)


def _address() -> tuple[str | None, ...]:
    """Where torchrun's environment says that the ranks meet."""
    return tuple(os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT", "RANK"))


@cache
def _rendezvous(address: tuple[str | None, ...]) -> dist.Store:
    """The store that all ranks share, met once in a process: rank 0 may be its server."""
    store: dist.Store
    try:
        store, _, _ = next(dist.rendezvous("env://"))
    except ValueError as error:  # a variable is missing or no number
        message = f"cannot tell where the ranks meet ({error}): start this program with torchrun"
        raise LaunchError(message) from error
    return store


def _check_place(program: RankProgram, rank: int, size: int) -> None:
    """Refuse a number of processes that is not the plan's, and the program of another rank."""
    if size != program.size:
        message = (
            f"the plan needs {program.size} processes ({size} started): "
            f"torchrun --nproc-per-node {program.size}, or nodes × processes that multiply to it"
        )
        raise LaunchError(message)
    if rank != program.rank:
        message = f"this is rank {rank} with the program of rank {program.rank}"
        raise LaunchError(message)
