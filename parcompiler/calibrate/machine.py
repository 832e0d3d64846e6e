"""The machine that is measured, and the labels of its measurements."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

GIGA = 10**9
WARM = 3  # calls before a capture
CAPTURED = 0.002  # s of calls in one graph


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine, as seen by one rank.

    `kind` is "cpu" or "cuda", `model` the vendor's name of the device, `memory` in bytes. The run
    has `ranks` ranks, of which this is number `rank`, on nodes with `ranks_per_node` each.
    """

    kind: str
    model: str
    threads: int
    memory: int
    devices_per_node: int
    rank: int = 0
    ranks: int = 1
    ranks_per_node: int = 1

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        index = int(os.environ.get("LOCAL_RANK", "0"))
        return torch.device("cpu") if self.kind == "cpu" else torch.device("cuda", index)

    @property
    def label(self) -> str:
        """Identifies the machine: measurements of operators with another label are not reused."""
        threads = f", threads: {self.threads}" if self.kind == "cpu" else ""
        return f"{self.model}{threads}, torch {torch.__version__}"

    @property
    def fabric(self) -> str:
        """Identifies the machine for measurements of messages."""
        return f"{self.label}, ranks: {self.ranks}, on a node: {self.ranks_per_node}"

    def clock(self) -> float:
        """The time in s; for one thread of a CPU, the time that it runs, whatever else the CPU
        does."""
        one_thread = self.kind == "cpu" and self.threads == 1
        return time.thread_time() if one_thread else time.perf_counter()

    def synchronize(self) -> None:
        """Wait until the device has finished."""
        if self.kind == "cuda":
            torch.cuda.synchronize(self.device)

    def repeated(self, call: Callable[[], object]) -> tuple[Callable[[], object], int]:
        """A function to time, and how often it makes `call`.

        On CUDA it is a graph of many calls, so that small kernels are timed without launches: in a
        training step the host launches ahead.
        """
        if self.kind != "cuda":
            return call, 1
        main, beside = torch.cuda.current_stream(self.device), _capture_stream(self.device)
        beside.wait_stream(main)
        with torch.cuda.stream(beside):  # captures require that libraries have allocated before
            for _ in range(WARM):
                call()
        self.synchronize()
        begin = time.perf_counter()
        with torch.cuda.stream(beside):
            call()
        self.synchronize()
        times = max(1, int(CAPTURED / (time.perf_counter() - begin)))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=beside):
            for _ in range(times):
                call()
        return graph.replay, times


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for all captures: cuBLAS keeps a workspace for each stream it runs on."""
    return torch.cuda.Stream(device)


def find_machine() -> Machine:
    """This machine, and this process's place under torchrun if that started it."""
    cuda = torch.cuda.is_available()
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    places = torch.cuda.device_count() if cuda else cores() // torch.get_num_threads()
    places = local_ranks if ranks > 1 else max(1, places)
    index = int(os.environ.get("LOCAL_RANK", "0"))
    return Machine(
        kind="cuda" if cuda else "cpu",
        model=torch.cuda.get_device_name(index) if cuda else _processor(),
        threads=torch.get_num_threads(),
        memory=torch.cuda.get_device_properties(index).total_memory if cuda else _ram() // places,
        devices_per_node=places,
        rank=int(os.environ.get("RANK", "0")),
        ranks=ranks,
        ranks_per_node=local_ranks,
    )


def cores() -> int:
    """The cores that this process may use."""
    counted = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return counted or 1


def _ram() -> int:
    """The memory of the machine in bytes; 16 GB if the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 16 * GIGA


def _processor() -> str:
    """The processor's name; Linux tells it in a file."""
    information = Path("/proc/cpuinfo")
    if information.is_file():
        for line in information.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine() or "CPU"
