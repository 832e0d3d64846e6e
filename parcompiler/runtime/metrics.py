"""Metrics of training steps: on the terminal, as JSON lines, and in TensorBoard.

step 20/200  loss 5.1034  2,310 tokens/s  MFU 31.2%  norm 1.84  lr 2.0e-04  0.41 GiB  ...
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from parcompiler.errors import InputError
from parcompiler.instruction import COMPUTE
from parcompiler.runtime.files import document
from parcompiler.runtime.worker import Worker


class Metrics:
    """The metrics of one worker's steps, reported by rank 0 after every `every` steps.

    `jsonl` is a file that gets a line of JSON each time; of a step that a resumed run makes again
    the last line counts. `tensorboard` is the folder of its events, where those of such steps are
    hidden, `steps` the number of steps in all. The rank that computes longest, and memory, are over
    all ranks in the reported step. MFU, the model's FLOPs over the peak of all devices, needs the
    report of the worker's export. Every rank makes one and makes the same calls. Raises InputError
    where `every` is no number of steps, the file cannot be written, or TensorBoard is not
    installed.
    """

    def __init__(
        self,
        worker: Worker,
        every: int = 10,
        jsonl: str | Path | None = None,
        tensorboard: str | Path | None = None,
        steps: int | None = None,
    ) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            message = f"every must be a number of steps, at least 1 ({every!r} given)"
            raise InputError(message)
        self._worker, self._every, self._steps = worker, every, steps
        self._losses: list[torch.Tensor] = []
        self._began, self._first = math.nan, 0  # known when the first step begins
        self._events: Any = None  # made when the first step that is made again is known
        self._writer: Callable[..., Any] | None = None
        self._file = None
        if worker.rank == 0 and jsonl is not None:
            try:
                Path(jsonl).parent.mkdir(parents=True, exist_ok=True)
                self._file = Path(jsonl).open("a", encoding="utf-8")
            except OSError as error:
                message = f"cannot write metrics into {jsonl} ({error.strerror}): give another file"
                raise InputError(message) from error
        if worker.rank == 0 and tensorboard is not None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                message = (
                    "TensorBoard is not installed: pip install tensorboard, or leave tensorboard "
                    "out"
                )
                raise InputError(message) from error
            self._writer = partial(SummaryWriter, str(tensorboard))
        program = worker.program
        integers = [s for s in program.inputs.values() if not s.dtype.is_floating_point]
        rows = next((s.shape for s in integers if len(s.shape) == 2), (1, 1))
        self._unit = "tokens" if rows != (1, 1) else "samples"
        self._amount = program.samples_of_step * (rows[1] if self._unit == "tokens" else 1)
        step: dict[str, float] = {}
        with suppress(InputError):  # the report of an export is not needed
            if worker.folder is not None:
                step = document(worker.folder / "report.json").get("step", {})
        self._full = step.get("mfu", 0.0) * step.get("seconds", 0.0)  # s of a step at peak speed

    def before_step(self) -> None:
        """Measure the next step, if it is to be reported."""
        if math.isnan(self._began):  # a checkpoint may have been loaded meanwhile
            self._began, self._first = time.perf_counter(), self._worker.step_count
        self._worker.record(self._is_told(self._worker.step_count + 1))

    def after_step(self, loss: torch.Tensor, rate: float) -> None:
        """Note a step, its `loss` and its learning `rate`; a collective if it is reported."""
        worker, step = self._worker, self._worker.step_count
        self._losses.append(loss)
        if not self._is_told(step):
            return
        computing = sum(
            t.end - t.begin - t.waited for t in worker.trace() if t.instruction.kind in COMPUTE
        )
        ranks = worker.gather_numbers(int(computing * 1e9), _memory(worker.device))
        seconds = (time.perf_counter() - self._began) / (step - self._first)
        mean = sum(nanoseconds for nanoseconds, _ in ranks) / len(ranks)
        slowest = max(range(len(ranks)), key=lambda rank: ranks[rank][0])
        norm = worker.gradient_norm
        self.tell(step, {
            "loss": float(torch.stack(self._losses).mean()),
            f"{self._unit}_per_second": self._amount / seconds,
            **({"mfu": self._full / seconds} if self._full else {}),
            **({} if norm is None else {"gradient_norm": float(norm)}),
            "learning_rate": rate,
            "memory": max(memory for _, memory in ranks),
            "slowest_rank": slowest,
            "slowest_over_mean": ranks[slowest][0] / mean - 1 if mean else 0.0,
            "seconds": seconds,
        })  # fmt: skip
        self._losses, self._began, self._first = [], time.perf_counter(), step

    def tell(self, step: int, numbers: dict[str, float]) -> None:
        """Report `numbers` of a `step` by name, on rank 0."""
        if self._worker.rank:
            return
        print(_line(step, self._steps, numbers), flush=True)
        if self._file is not None:
            self._file.write(json.dumps({"step": step, **numbers}) + "\n")
            self._file.flush()
        if self._writer is not None and self._events is None:
            first = step if math.isnan(self._began) else self._first + 1
            self._events = self._writer(purge_step=first)
        if self._events is not None:
            for name, value in numbers.items():
                self._events.add_scalar(name, value, step)

    def close(self) -> None:
        """Close the files."""
        for file in (self._file, self._events):
            if file is not None:
                file.close()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context for work outside of steps, which is not timed: an evaluation, a checkpoint."""
        began = time.perf_counter()
        yield
        self._began += time.perf_counter() - began

    def _is_told(self, step: int) -> bool:
        return step % self._every == 0 or step == self._steps


def _line(step: int, steps: int | None, numbers: dict[str, float]) -> str:
    """One line for the terminal."""
    forms = {
        "loss": "loss {:.4f}", "tokens_per_second": "{:,.0f} tokens/s",
        "samples_per_second": "{:,.1f} samples/s", "mfu": "MFU {:.1%}",
        "gradient_norm": "norm {:.2f}", "learning_rate": "lr {:.1e}",
        "evaluation_loss": "evaluation loss {:.4f}",
    }  # fmt: skip
    parts = [form.format(numbers[name]) for name, form in forms.items() if name in numbers]
    if "memory" in numbers:
        parts.append(f"{numbers['memory'] / 2**30:.2f} GiB")
    if "slowest_rank" in numbers:
        over = numbers["slowest_over_mean"]
        parts.append(f"slowest rank {numbers['slowest_rank']:.0f} (+{over:.0%})")
    return "  ".join([f"step {step}{f'/{steps}' if steps else ''}", *parts])


def _memory(device: torch.device) -> int:
    """Peak bytes of this rank: of its GPU, or of its process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        import resource
    except ImportError:  # Windows has none
        return 0
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
