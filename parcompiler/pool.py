"""Processes on this machine that run the ranks of programs, kept between proofs and measurements.

Starting a process and importing torch takes seconds, a proof a fraction of one; so the first
proof starts the processes and later ones use them. They end with this process.
"""

from __future__ import annotations

import atexit
import json
import os
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
from typing import Any

import torch
from safetensors.torch import save_file

from parcompiler.errors import LaunchError
from parcompiler.runtime.weights import read, storable

PATIENCE = 120.0  # seconds for one job, over and above what the job itself takes
GRACE = 5.0  # seconds that the others have to say more, once a process has failed
_TORCHRUN = frozenset(
    "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK ROLE_NAME "
    "ROLE_WORLD_SIZE MASTER_ADDR MASTER_PORT".split()
)


@dataclass(frozen=True)
class Job:
    """Steps of an exported program, each on a batch (tensors by key) and with an optimizer's step.

    `optimizer` is the name of one in torch.optim, with its `options`. `draws` are, for each stage,
    the numbers of its random operators' draws; None leaves chance alone. `patience` are the seconds
    that it may take. `scale` is that of the loss, for a float16 program, `max_norm` what gradients
    are clipped to.
    """

    program: str
    batches: Sequence[Mapping[str, torch.Tensor]]
    seed: int = 0
    optimizer: str = "SGD"
    options: Mapping[str, float] = field(default_factory=lambda: {"lr": 0.01})
    draws: Mapping[int, Mapping[str, Sequence[int]]] | None = None
    patience: float = PATIENCE
    scale: float | None = None
    max_norm: float | None = None


@dataclass(frozen=True)
class Outcome:
    """What came out: the mean loss of each step, parameters and buffers afterwards by name.

    `gradients` are those of the first step by name; an asynchronous program leaves none. `norms`
    are those of the gradients of each step, where something asks for them; `scale` is what the loss
    of the next step is multiplied by for its backward.
    """

    losses: torch.Tensor
    gradients: Mapping[str, torch.Tensor]
    state: Mapping[str, torch.Tensor]
    scale: float = 1.0
    norms: torch.Tensor | None = None

    @property
    def loss(self) -> torch.Tensor:
        """The mean loss of the first step."""
        return self.losses[0]


class Pool:
    """Processes that are started when first needed, and again when some are gone."""

    def __init__(self) -> None:
        self._members: list[subprocess.Popen[bytes]] = []
        self._home = os.getpid()
        atexit.register(self.close)

    def run(self, job: Job, size: int) -> Outcome:
        """Run every rank of a program. Raises LaunchError with the first cause when one fails."""
        with tempfile.TemporaryDirectory(prefix="parcompiler-") as folder:
            for number, tensors in enumerate(job.batches):
                batch, metadata = storable(tensors)
                save_file(batch, Path(folder) / f"batch_{number}.safetensors", metadata)
            messages = [_message(job, rank, size, folder) for rank in range(size)]
            self.ask(messages, job.patience)
            numbers, gradients, state = (
                dict(read(Path(folder) / f"{name}.safetensors"))
                for name in ("losses", "gradients", "state")
            )
            return Outcome(
                numbers["losses"],
                gradients,
                state,
                scale=float(numbers["scale"]),
                norms=numbers["norms"],
            )

    def ask(self, messages: Sequence[dict[str, Any]], patience: float) -> None:
        """Give each of some processes its part of a job, and wait until all have done it.

        Raises LaunchError with the first cause when one fails, or takes more than `patience` s.
        """
        if any(member.poll() is not None for member in self._members):
            self.close()
        while len(self._members) < len(messages):
            self._members.append(_start())
        try:
            for rank, message in enumerate(messages):
                self._send(rank, message)
            failures = self._failures(len(messages), patience)
            if failures:
                raise LaunchError(_cause(failures))
        except BaseException:  # an interruption too: what they would answer is of no use
            self.close()
            raise

    def close(self) -> None:
        """End the processes; a fork of the process that started them leaves them alone."""
        members, self._members = self._members, []
        for member in members if os.getpid() == self._home else ():
            member.kill()
            member.wait()
            for stream in (member.stdin, member.stdout):
                if stream is not None:
                    with suppress(OSError):  # what it never read
                        stream.close()

    def _send(self, rank: int, message: dict[str, Any]) -> None:
        """Give a process its part of the job; one that is gone shows when it does not answer."""
        stream = self._members[rank].stdin
        assert stream is not None
        with suppress(BrokenPipeError):
            stream.write(json.dumps(message).encode() + b"\n")
            stream.flush()

    def _failures(self, size: int, patience: float) -> list[dict[str, Any]]:
        """Wait for all ranks at once; the failures in the order in which they came.

        When one has failed the others have a moment to fail as well, and to say why.
        """
        end = time.monotonic() + patience
        waiting: dict[Any, int] = {self._members[rank].stdout: rank for rank in range(size)}
        failures: list[dict[str, Any]] = []
        while waiting:
            left = max(0.0, end - time.monotonic())
            ready = wait(list(waiting), left)
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
        """What a process answers; a failure when it died."""
        stream = self._members[rank].stdout
        assert stream is not None
        line = stream.readline()
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        code = self._members[rank].wait()
        text = f"the process of rank {rank} died (exit code {code})"
        return {"ok": False, "kind": "LaunchError", "text": text}


def _cause(failures: Sequence[Mapping[str, Any]]) -> str:
    """The failure that the others follow from: they only lost their connection to it."""
    own = [failure for failure in failures if "lost its connection" not in failure["text"]]
    cause = (own or failures)[0]
    return cause["text"] if cause["kind"] == "LaunchError" else f"{cause['kind']}: {cause['text']}"


def pool() -> Pool:
    """The processes of this process."""
    return _pool_of(os.getpid())


@cache
def _pool_of(_process: int) -> Pool:
    """One pool for a process; a fork has its own."""
    return Pool()


def _message(job: Job, rank: int, size: int, folder: str) -> dict[str, Any]:
    """The job of one rank as JSON-able data."""
    return {
        "rank": rank,
        "size": size,
        "program": job.program,
        "batches": [f"{folder}/batch_{k}.safetensors" for k in range(len(job.batches))],
        "store": f"{folder}/store",
        "out": folder,
        "seed": job.seed,
        "optimizer": job.optimizer,
        "options": dict(job.options),
        "draws": job.draws,
        "scale": job.scale,
        "max_norm": job.max_norm,
    }


def _start() -> subprocess.Popen[bytes]:
    """A process that waits for jobs, on the CPU with one thread.

    It imports from where this process does, and knows nothing of a torchrun that started this one.
    Interruptions from the keyboard are for this process alone, which then ends it.
    """
    environment = {k: v for k, v in os.environ.items() if not _is_torchruns(k)} | {
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        "PARCOMPILER_DEVICE": "cpu",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
    }
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "parcompiler.member"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        start_new_session=True,
    )


def _is_torchruns(name: str) -> bool:
    """Whether torchrun sets this variable of the environment."""
    return name in _TORCHRUN or name.startswith("TORCHELASTIC_")
