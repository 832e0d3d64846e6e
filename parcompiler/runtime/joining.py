"""How a process becomes a rank: its device, and torch.distributed from its environment.

torchrun and a PyTorchJob of Kubeflow set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; the
variables of srun are translated into these.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist

from parcompiler.errors import LaunchError
from parcompiler.runtime.program import RankProgram

OVERRIDE = "PARCOMPILER_DEVICE"
# A rank has a stream for each of its process groups. CUDA puts streams into 8 queues unless this
# says more (32 at most), read when it starts: in one queue, a message that waits for its peer can
# stand before the very message that the peer waits for, and all ranks hang.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")
PORTS = range(15_000, 30_000)  # below the range of ephemeral ports
_FIRST_NODE = re.compile(r"([^,\[]+)(?:\[(\d+)[^\]]*\])?([^,\[]*)")  # of gpu[003-006,010],other
_STORES: dict[tuple[str | None, ...], dist.Store] = {}  # of this process, by where its ranks meet


def meet(program: RankProgram, timeout: timedelta) -> dist.Store | None:
    """The store that all ranks share, for keys of this worker alone; None for one process.

    Raises LaunchError when this process is not one of the program's, or others do not join.
    """
    if dist.is_initialized():
        _check_place(program, dist.get_rank(), dist.get_world_size())
        assert dist.group.WORLD is not None
        store: dist.Store = dist.group.WORLD.get_group_store()
    elif (at := place()) is not None:
        _check_place(program, *at)
        store = rendezvous(timeout)
    elif program.size > 1:
        message = f"start this program with torchrun --nproc-per-node {program.size}"
        raise LaunchError(message)
    else:
        return None
    # A prefix keeps this worker's keys apart from those of earlier ones, and of their failures.
    # Every rank makes its workers in the same order.
    return dist.PrefixStore(f"parcompiler/{store.add(f'workers/{program.rank}', 1)}", store)


def start(
    program: RankProgram, device: torch.device, store: dist.Store | None, timeout: timedelta
) -> None:
    """Initialize torch.distributed unless it is."""
    # Every optimizer imports torch._dynamo, and that import keeps alive a process group that is
    # open by then, whose threads may abort the process at exit. So import it first.
    import torch._dynamo

    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group(
            backend_of(device),
            store=dist.HashStore() if store is None else store,
            rank=program.rank,
            world_size=program.size,
            timeout=timeout,
        )


def current_rank(size: int) -> int:
    """The rank of this process. Raises LaunchError when it cannot be one of `size`."""
    if dist.is_initialized():
        rank, number = dist.get_rank(), dist.get_world_size()
    else:
        rank, number = place() or (0, 1)
    _check_size(size, number)
    return rank


def place() -> tuple[int, int] | None:
    """This process's rank and the number of ranks, from its environment; None for a process that
    was started alone.

    Raises LaunchError when they are no numbers.
    """
    if "RANK" not in os.environ:
        os.environ.update(_of_srun(os.environ))
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


def _of_srun(environ: Mapping[str, str]) -> dict[str, str]:
    """torchrun's variables for a task of several that srun has started; none for other processes,
    such as the script of a batch job.

    The ranks meet at the first node of the step, at a port derived from job and step.
    """
    size, nodes = environ.get("SLURM_STEP_NUM_TASKS", ""), environ.get("SLURM_STEP_NODELIST", "")
    first = _FIRST_NODE.match(nodes)
    if not size.isdecimal() or int(size) < 2 or first is None or "SLURM_PROCID" not in environ:
        return {}
    numbers = [int(environ.get(name, "0")) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")]
    alone = "SLURM_GPUS_PER_TASK" in environ  # a task sees its own devices, counted from 0
    return {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": size,
        "LOCAL_RANK": "0" if alone else environ.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": _tasks_here(environ),
        "MASTER_ADDR": environ.get("MASTER_ADDR") or "".join(filter(None, first.groups())),
        "MASTER_PORT": environ.get("MASTER_PORT") or str(PORTS[sum(numbers) % len(PORTS)]),
    }


def _tasks_here(environ: Mapping[str, str]) -> str:
    """The number of tasks of a step on this node, out of a list for all nodes such as 8(x2),4."""
    tasks: list[str] = []
    for count, nodes in _TASKS.findall(environ.get("SLURM_STEP_TASKS_PER_NODE", "1")):
        tasks += [count] * int(nodes or 1)
    node = int(environ.get("SLURM_NODEID", "0"))
    return tasks[node] if node < len(tasks) else "1"


def rank_among(ranks: range) -> int:
    """This process's rank if it is one of `ranks`, else the first (for reading, not running)."""
    started = (dist.get_rank(), 0) if dist.is_initialized() else place()
    return started[0] if started is not None and started[0] in ranks else ranks[0]


def host(store: dist.Store | None) -> str:
    """The process that hosts the store: rank 0 for a TCP store, unless torchrun does."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    by_rank = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    return "rank 0" if isinstance(store, dist.TCPStore) and by_rank else "its server"


def rendezvous(timeout: timedelta) -> dist.Store:
    """The store that all ranks share, opened once in a process, as rank 0 may be its server.

    Raises LaunchError when the environment does not say where the ranks meet, or others do not
    join.
    """
    address = tuple(os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT", "RANK"))
    if address not in _STORES:
        try:
            _STORES[address], _, _ = next(dist.rendezvous("env://", timeout=timeout))
        except ValueError as error:  # a variable is missing or no number
            message = (
                f"cannot tell where the ranks meet ({error}): start this program with torchrun"
            )
            raise LaunchError(message) from error
        except dist.DistError as error:
            message = f"the ranks did not meet within {timeout.total_seconds():g} s ({error})"
            raise LaunchError(message) from error
    return _STORES[address]


def _check_place(program: RankProgram, rank: int, size: int) -> None:
    """Refuse a number of processes that is not the plan's, and the program of another rank."""
    _check_size(program.size, size)
    if rank != program.rank:
        message = (
            f"this process is rank {rank}, and runs the script of rank {program.rank}: start "
            "main.py, which takes the right one"
        )
        raise LaunchError(message)


def _check_size(size: int, processes: int) -> None:
    """Refuse a number of processes that is not the plan's."""
    if processes != size:
        message = (
            f"the plan needs {size} processes ({processes} started): "
            f"torchrun --nproc-per-node {size}, or nodes × processes that multiply to it"
        )
        raise LaunchError(message)


def rank_device(planned: str, index: int | None = None) -> torch.device:
    """The device of this process for a plan made for `planned` (a name such as "cpu" or "h100"); of
    the process of LOCAL_RANK `index` where that is given.

    A plan for "cpu", or for a measured one such as "cpu-measured", runs on the CPU, any other on
    the CUDA device of this process's LOCAL_RANK; PARCOMPILER_DEVICE, "cpu" or "cuda", overrides
    this. Raises LaunchError without such a device.
    """
    on_cpu = planned == "cpu" or planned.startswith("cpu-")
    wanted = os.environ.get(OVERRIDE) or ("cpu" if on_cpu else "cuda")
    if wanted not in ("cpu", "cuda"):
        message = f"{OVERRIDE} must be 'cpu' or 'cuda' ({wanted!r} given)"
        raise LaunchError(message)
    if wanted == "cpu":
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", "0")) if index is None else index
    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        message = (
            f"the plan is for device {planned!r} and needs CUDA device {index} ({count} found); "
            f"{OVERRIDE}=cpu runs it on the CPU"
        )
        raise LaunchError(message)
    return torch.device("cuda", index)


def backend_of(device: torch.device) -> str:
    """The torch.distributed backend for tensors on `device`."""
    return "nccl" if device.type == "cuda" else "gloo"
