"""Processes on this machine that run the ranks of programs, kept between verifications and
measurements.

Importing torch takes seconds, a verification a fraction of one; so the first one starts a process
that imports it and forks the others, which later ones reuse. They end with this process.
"""

from __future__ import annotations

import atexit
import dataclasses
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, BinaryIO

import torch

from parcompiler.errors import LaunchError
from parcompiler.runtime.tensor_files import read, write

PATIENCE = 120.0  # seconds for one job, beside the work of the job itself
GRACE = 5.0  # seconds that others get to report too, after a process has failed
_TORCHRUN = frozenset(
    "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK ROLE_NAME "
    "ROLE_WORLD_SIZE MASTER_ADDR MASTER_PORT".split()
)


@dataclass(frozen=True)
class Job:
    """Steps of an exported program, each on a batch (tensors by key) and with an optimizer step.

    `optimizer` is the name of one in torch.optim, with its `options`. `draws` are, for each stage,
    the numbers of its random operators' draws; None leaves the RNG alone. `patience` is the time
    limit in seconds. `scale` is the loss scale of a float16 program, `max_norm` the limit for
    clipping gradients. `compiled`: layers are compiled. `device` is "cpu", or "cuda" for this
    machine's GPUs, which ranks share if there are fewer. With `evaluate`, the first micro-batch of
    each data rank is evaluated before the steps.
    """

    program: str
    batches: Sequence[Mapping[str, torch.Tensor]]
    seed: int = 0
    optimizer: str = "SGD"
    options: Mapping[str, Any] = field(default_factory=lambda: {"lr": 0.01})
    draws: Mapping[int, Mapping[str, Sequence[int]]] | None = None
    patience: float = PATIENCE
    scale: float | None = None
    max_norm: float | None = None
    compiled: bool = False
    device: str = "cpu"
    evaluate: bool = False


@dataclass(frozen=True)
class Outcome:
    """The mean loss of each step, and parameters and buffers afterwards by name.

    `gradients` are those of the first step by name; an asynchronous program leaves none. `norms`
    are those of the gradients of each step, if a worker computes them; `scale` is the loss scale of
    the next step. `compression_error` is the error of compressed gradients relative to whole ones,
    `arrivals` the order in which the steps of data ranks counted. `evaluation` is the loss of the
    first micro-batches in evaluation mode, before the steps.
    """

    losses: torch.Tensor
    gradients: Mapping[str, torch.Tensor]
    state: Mapping[str, torch.Tensor]
    scale: float = 1.0
    compression_error: float | None = None
    norms: torch.Tensor | None = None
    arrivals: torch.Tensor | None = None
    evaluation: torch.Tensor | None = None

    @property
    def loss(self) -> torch.Tensor:
        """The mean loss of the first step."""
        return self.losses[0]


@dataclass(frozen=True)
class RankProcess:
    """A process that runs ranks: it reads jobs and writes answers, each a line of JSON.

    When it dies, the `parent` that forked it writes an answer that says so.
    """

    parent: subprocess.Popen[bytes]
    jobs: BinaryIO
    answers: BinaryIO


class Pool:
    """Processes that are started when first needed, and again when some are gone."""

    def __init__(self) -> None:
        self._processes: list[RankProcess] = []
        self._home = os.getpid()
        atexit.register(self.close)

    def run(self, job: Job, size: int) -> Outcome:
        """Run every rank of a program. Raises LaunchError with the first cause when one fails."""
        with tempfile.TemporaryDirectory(prefix="parcompiler-") as folder:
            for number, tensors in enumerate(job.batches):
                write(Path(folder) / f"batch_{number}.safetensors", tensors)
            fields = {f.name: getattr(job, f.name) for f in dataclasses.fields(job)}
            fields["batches"] = [f"{folder}/batch_{k}.safetensors" for k in range(len(job.batches))]
            fields |= {"options": dict(job.options), "store": f"{folder}/store", "out": folder}
            messages = [{**fields, "rank": rank, "size": size} for rank in range(size)]
            self.ask(messages, job.patience)
            numbers, gradients, state = (
                dict(read(Path(folder) / f"{name}.safetensors"))
                for name in ("losses", "gradients", "state")
            )
            return Outcome(
                numbers["losses"], gradients, state, float(numbers["scale"]),
                norms=numbers["norms"], arrivals=numbers.get("arrivals"),
                evaluation=numbers.get("evaluation"),
            )  # fmt: skip

    def start(self, size: int) -> None:
        """Start missing processes, without waiting for them."""
        if wait([process.answers.fileno() for process in self._processes], 0):  # one has died
            self.close()
        if len(self._processes) < size:
            self._processes += _start(size - len(self._processes))

    def ask(self, messages: Sequence[dict[str, Any]], patience: float) -> None:
        """Give each of some processes its part of a job, and wait until all have done it.

        Raises LaunchError with the first cause when one fails, or takes more than `patience` s.
        """
        try:
            self.start(len(messages))
            for process, message in zip(self._processes, messages, strict=False):
                with suppress(BrokenPipeError):  # a dead one is noticed when it does not answer
                    process.jobs.write(json.dumps(message).encode() + b"\n")
                    process.jobs.flush()
            failures = self._failures(len(messages), patience)
            if failures:
                raise LaunchError(_cause(failures))
        except BaseException:  # interruptions too: answers would be stale
            self.close()
            raise

    def close(self) -> None:
        """End the processes; a fork of the process that started them leaves them alone."""
        processes, self._processes = self._processes, []
        for process in processes if os.getpid() == self._home else ():
            if process.parent.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.parent.pid, signal.SIGKILL)
                process.parent.wait()
            for stream in (process.jobs, process.answers, process.parent.stdin):
                assert stream is not None
                with suppress(OSError):  # data that it never read
                    stream.close()

    def _failures(self, size: int, patience: float) -> list[dict[str, Any]]:
        """Wait for all ranks.

        Returns failures in order of arrival. After the first one the others get `GRACE` seconds to
        report theirs.
        """
        end = time.monotonic() + patience
        waiting: dict[Any, int] = {
            self._processes[rank].answers.fileno(): rank for rank in range(size)
        }
        failures: list[dict[str, Any]] = []
        while waiting:
            ready = wait(list(waiting), max(0.0, end - time.monotonic()))
            if not ready:
                late = ", ".join(str(rank) for rank in sorted(waiting.values()))
                text = f"rank {late} did not answer within {patience:.0f} s"
                return failures or [{"ok": False, "kind": "LaunchError", "text": text}]
            for stream in ready:
                rank = waiting.pop(stream)
                answer = self._answer(rank)
                if not answer["ok"]:
                    failures.append(answer)
                    end = min(end, time.monotonic() + GRACE)
        return failures

    def _answer(self, rank: int) -> dict[str, Any]:
        """The answer of a process; a failure when it died."""
        line = self._processes[rank].answers.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"died": "with its parent"}
        if "died" in answer:
            text = f"the process of rank {rank} died ({answer['died']})"
            return {"ok": False, "kind": "LaunchError", "text": text}
        return answer


def _cause(failures: Sequence[Mapping[str, Any]]) -> str:
    """The first cause: other failures are only lost connections to it."""
    first = [failure for failure in failures if "lost its connection" not in failure["text"]]
    cause = (first or failures)[0]
    return cause["text"] if cause["kind"] == "LaunchError" else f"{cause['kind']}: {cause['text']}"


def pool() -> Pool:
    """The pool of this process."""
    return _pool_of(os.getpid())


@cache
def _pool_of(_process: int) -> Pool:
    """One pool for a process; a fork has its own."""
    return Pool()


def _start(count: int) -> list[RankProcess]:
    """Processes that wait for jobs, on the CPU with one thread, forked from one that has torch.

    They have this process's import path, but no environment of a torchrun that started it. Keyboard
    interrupts reach this process only, which then ends them.
    """
    outside = {name for name in os.environ if name.startswith("TORCHELASTIC_")} | _TORCHRUN
    environment = {k: v for k, v in os.environ.items() if k not in outside} | {
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        "PARCOMPILER_DEVICE": "cpu",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
    }
    jobs, answers = [os.pipe() for _ in range(count)], [os.pipe() for _ in range(count)]
    ends = [(read, write) for (read, _), (_, write) in zip(jobs, answers, strict=True)]
    parent = subprocess.Popen(
        [sys.executable, "-P", "-m", "parcompiler.verification.rank_process", json.dumps(ends)],
        stdin=subprocess.PIPE,  # ends when this process does
        pass_fds=[end for pair in ends for end in pair],
        env=environment,
        start_new_session=True,
    )
    for end in itertools.chain.from_iterable(ends):
        os.close(end)
    return [
        RankProcess(parent, os.fdopen(write, "wb"), os.fdopen(read, "rb", buffering=0))
        for (_, write), (read, _) in zip(jobs, answers, strict=True)
    ]
