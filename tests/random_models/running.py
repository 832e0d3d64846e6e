"""Runs random cases: compiles one, lets its ranks train, and compares them with the plain loop.

The ranks are processes of this file's own, kept from case to case, and run `plain.py`: those of
`parcompiler.verification` are a part of `verify()`, and a fault in them would hide here too.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

import parcompiler as pc
from tests.random_models import plain
from tests.random_models.generator import Case, eager, module_of

PATIENCE = 600.0 if os.environ.get("COMPILED") else 180.0  # seconds for the ranks of one case
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a case: "passed", "refused" or the kind of its failure; and why."""

    kind: str
    text: str = ""
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        """Whether something is wrong."""
        return self.kind not in ("passed", "refused")


class Ranks:
    """Processes that run the ranks of one program after another."""

    def __init__(self) -> None:
        self._members: list[subprocess.Popen[str]] = []

    def run(self, folder: Path, size: int) -> str:
        """Run all ranks of an exported case; what the first that failed says, or ""."""
        while len(self._members) < size:
            self._members.append(_started())
        members = self._members[:size]
        for rank, member in enumerate(members):
            assert member.stdin is not None
            line = {"folder": str(folder), "rank": rank, "size": size}
            with suppress(BrokenPipeError):
                member.stdin.write(json.dumps(line) + "\n")
                member.stdin.flush()
        return self._answers(members)

    def _answers(self, members: list[subprocess.Popen[str]]) -> str:
        """The first failure, once all have answered or some have had time enough."""
        end = time.monotonic() + PATIENCE
        waiting: dict[Any, int] = {member.stdout: rank for rank, member in enumerate(members)}
        failures = []
        while waiting and (ready := wait([*waiting], max(0.0, end - time.monotonic()))):
            for stream in ready:
                rank = waiting.pop(stream)
                line = members[rank].stdout.readline()  # type: ignore[union-attr]
                answer = json.loads(line) if line else "the process died"
                if answer:
                    failures.append(f"rank {rank}: {answer}")
                    end = min(end, time.monotonic() + 10)
        if waiting:
            failures.append(f"hang: rank {sorted(waiting.values())} did not answer")
        if waiting or any("died" in failure for failure in failures):
            self.close()
        first = [f for f in failures if "lost its connection" not in f]
        return (first or failures or [""])[0]

    def close(self) -> None:
        """End the processes."""
        for member in self._members:
            member.kill()
            member.communicate()
        self._members = []


def _started() -> subprocess.Popen[str]:
    """A process that waits for jobs."""
    environment = dict(os.environ) | {
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        "PARCOMPILER_DEVICE": "cpu",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
    }
    command = [sys.executable, "-P", str(Path(plain.__file__)), "serve"]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=environment, text=True
    )


@contextmanager
def ranks() -> Iterator[Ranks]:
    """Processes for cases, ended at the end."""
    own = Ranks()
    try:
        yield own
    finally:
        own.close()


def run(case: Case, own: Ranks) -> Verdict:
    """Compile, train and compare one case."""
    begin = time.perf_counter()
    torch.set_num_threads(1)
    kind, text = _judged(case, own)
    return Verdict(kind, text, time.perf_counter() - begin)


def _judged(case: Case, own: Ranks) -> tuple[str, str]:
    """The kind of what happened, and its text."""
    with tempfile.TemporaryDirectory(prefix="random-model-") as name:
        folder = Path(name)
        if refusal := eager(case):
            return "no model", refusal
        module = module_of(case, folder)
        try:
            size = plain.written(module, folder)
        except pc.ParcompilerError as error:
            return "refused", f"{type(error).__name__}: {error}"
        except Exception as error:
            return f"crash {type(error).__name__}", f"{type(error).__name__}: {error}"
        if failure := own.run(folder, size):
            return f"ranks {_kind(failure)}", failure
        faults = plain.compared(module, folder, size)
    return (_kind(faults[0]), "\n".join(faults)) if faults else ("passed", "")


def _kind(fault: str) -> str:
    """The kind of a fault: its sentence without names and numbers."""
    label, _, text = fault.splitlines()[0].partition(": ")
    words = re.sub(r"\b[\w.]*[\d_.][\w.+-]*|'.*|\".*|\(.*", "", text).split()
    return " ".join([label.split()[0], *words[:6]])
