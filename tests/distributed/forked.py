"""Ranks that are forked from a process that has imported torch and parcompiler.

A start takes a tenth of a second, where torchrun takes six seconds of CPU time for each rank. What
is said of the launcher itself is tested with `torchrun.torchrun`.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import random
import runpy
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from parcompiler.runtime.joining import PORTS

TIMEOUT = 180.0  # s
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["torch._dynamo", "parcompiler.flow", "parcompiler.runtime"])


def start(
    size: int, folder: Path, main: Callable[..., None], *arguments: str, store: int | None = None
) -> list[BaseProcess]:
    """Processes that are ranks and call `main`; `log_N` in the folder is what rank N prints.

    They meet at the port of a `store`, or at one that rank 0 serves.
    """
    environment = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store or free_port()),
        "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size),
        "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "FATAL",
    }  # fmt: skip
    if store is not None:  # as torchrun says that its agent serves the store
        environment["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    ranks: list[BaseProcess] = []
    for rank in range(size):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        of_rank = (folder / f"log_{rank}", environment | place, main, arguments)
        process = _SERVER.Process(target=_become, args=of_rank, daemon=True)
        process.start()
        ranks.append(process)
    return ranks


def run(size: int, main: Callable[..., None], *arguments: str, ok: bool = True) -> str:
    """What `main` prints as `size` ranks, which all end well, or not all."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        ranks = start(size, Path(folder), main, *arguments, store=store.port)
        end = time.monotonic() + TIMEOUT
        for process in ranks:
            process.join(max(0.0, end - time.monotonic()))
        codes = [process.exitcode for process in ranks]
        for process in ranks:
            process.kill()
            process.join()
        text = "".join((Path(folder) / f"log_{rank}").read_text() for rank in range(size))
    if None in codes:
        pytest.fail(f"exit codes after {TIMEOUT:g} s: {codes}\n{text}")
    assert (codes == [0] * size) is ok, text
    return text


def script(path: str, *arguments: str) -> None:
    """Run a script as Python does; a `main` of ranks."""
    sys.argv, sys.path[0] = [path, *arguments], str(Path(path).parent)
    runpy.run_path(path, run_name="__main__")


def children(pid: int) -> list[int]:
    """The processes that a process has started."""
    return [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def free_port() -> int:
    """A port that nobody listens on, of those that a system does not give to clients."""
    for port in random.SystemRandom().sample(PORTS, 100):
        with contextlib.suppress(OSError), socket.socket() as free:
            free.bind(("127.0.0.1", port))
            return port
    message = "no port is free"
    raise AssertionError(message)


def _become(
    log: Path, environment: dict[str, str], main: Callable[..., None], arguments: tuple[str, ...]
) -> None:
    """Become a rank."""
    for name in [name for name in os.environ if "TORCHELASTIC" in name]:
        del os.environ[name]
    os.environ |= environment
    output = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    torch.set_num_threads(1)
    try:
        main(*arguments)
    except Exception as error:
        sys.last_value = error  # as where an interpreter ends
        raise
    finally:
        atexit._run_exitfuncs()
