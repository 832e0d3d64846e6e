"""Processes on this machine that run the ranks of programs, kept between proofs.

Starting a process and importing torch takes seconds, a proof a fraction of one; so the first
proof starts the processes and later ones use them. They end with this process.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from parcompiler.errors import LaunchError

PATIENCE = 600.0  # seconds for one job


@dataclass(frozen=True)
class Job:
    """One step of an exported program on a batch (tensors by key), then one of gradient descent.

    `positions` are, for each stage, the places of its random operators in the model; None leaves
    chance alone.
    """

    program: str
    batch: Mapping[str, torch.Tensor]
    seed: int = 0
    learning_rate: float = 0.01
    positions: Mapping[int, Sequence[int]] | None = None


@dataclass(frozen=True)
class Outcome:
    """What came out: mean loss, gradients by name, parameters and buffers afterwards by name."""

    loss: torch.Tensor
    gradients: Mapping[str, torch.Tensor]
    state: Mapping[str, torch.Tensor]


class Pool:
    """Processes that are started when first needed."""

    def __init__(self) -> None:
        self._members: list[subprocess.Popen[str]] = []
        atexit.register(self.close)

    def run(self, job: Job, size: int) -> Outcome:
        """Run every rank of a program. Raises LaunchError with the first cause when one fails."""
        while len(self._members) < size:
            self._members.append(_start())
        with tempfile.TemporaryDirectory(prefix="parcompiler-") as folder:
            batch = {name: tensor.contiguous().clone() for name, tensor in job.batch.items()}
            save_file(batch, Path(folder) / "batch.safetensors")
            for rank in range(size):
                self._send(rank, _message(job, rank, size, folder))
            answers = [self._answer(rank) for rank in range(size)]
            failures = [answer for answer in answers if not answer["ok"]]
            if failures:
                self.close()
                cause = next((f for f in failures if f["kind"] != "LaunchError"), failures[0])
                message = f"{cause['kind']}: {cause['text']}"
                raise LaunchError(message)
            return Outcome(
                load_file(Path(folder) / "loss.safetensors")["loss"].reshape(()),
                load_file(Path(folder) / "gradients.safetensors"),
                load_file(Path(folder) / "state.safetensors"),
            )

    def close(self) -> None:
        """End the processes."""
        for member in self._members:
            member.kill()
            member.wait()
            for stream in (member.stdin, member.stdout):
                if stream is not None:
                    stream.close()
        self._members.clear()

    def _send(self, rank: int, message: dict[str, Any]) -> None:
        """Give a process its part of the job."""
        stream = self._members[rank].stdin
        assert stream is not None
        stream.write(json.dumps(message) + "\n")
        stream.flush()

    def _answer(self, rank: int) -> dict[str, Any]:
        """What a process answers; a failure when it died or took too long."""
        stream = self._members[rank].stdout
        assert stream is not None
        ready, _, _ = select.select([stream], [], [], PATIENCE)
        line = stream.readline() if ready else ""
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        text = f"rank {rank} " + ("ended unexpectedly" if ready else f"took over {PATIENCE:.0f} s")
        return {"ok": False, "kind": "LaunchError", "text": text}


@cache
def pool() -> Pool:
    """The processes of this process."""
    return Pool()


def _message(job: Job, rank: int, size: int, folder: str) -> dict[str, Any]:
    """The job of one rank as JSON-able data."""
    return {
        "rank": rank,
        "size": size,
        "program": job.program,
        "batch": f"{folder}/batch.safetensors",
        "store": f"{folder}/store",
        "out": folder,
        "seed": job.seed,
        "learning_rate": job.learning_rate,
        "positions": job.positions,
    }


def _start() -> subprocess.Popen[str]:
    """A process that waits for jobs, on the CPU with one thread."""
    root = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    environment = os.environ | {
        "PYTHONPATH": path,
        "PARCOMPILER_DEVICE": "cpu",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
    }
    return subprocess.Popen(
        [sys.executable, "-m", "parcompiler.member"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
