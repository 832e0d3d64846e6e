"""Nothing in a training step waits for the device, but for what docs/reference/checks.md lists."""

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import parcompiler
from tests.runtime.workers import batch, compiled, mixed

SOURCE = str(Path(parcompiler.__file__).parent)
# Operators whose result the host needs before it goes on.
WAITING = frozenset("_local_scalar_dense equal is_nonzero nonzero masked_select _unique2".split())


class Waiting(TorchDispatchMode):
    """Lists the lines of parcompiler that wait for a value of the device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lines: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and note who waits for it."""
        if func._opname in WAITING:
            frames = traceback.extract_stack()
            # Torch's optimizers count their steps in tensors on the host.
            if not any("/torch/optim/" in frame.filename for frame in frames):
                ours = [frame.name for frame in frames if frame.filename.startswith(SOURCE)]
                self.lines += ours[-1:] or ["elsewhere"]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("precision", "options", "waiting"),
    [
        (None, {}, []),
        (None, {"max_norm": 1.0}, []),
        ("bf16", {"max_norm": 1.0}, []),
        ("fp16", {}, ["_is_good"]),  # whether the step is skipped
        (None, {"error_if_nonfinite": True}, ["_trained", "_is_good"]),  # whether to fail
    ],
)
def test_a_step_waits_only_where_the_host_must_know(
    precision: str | None, options: dict[str, Any], waiting: list[str]
) -> None:
    program = compiled(mixed(), precision=precision)
    with program.worker() as worker:
        worker.set_optimizer(torch.optim.AdamW, lr=1e-3, **options)
        worker.train_step(batch(3))  # the first makes states and compares ranks
        with Waiting() as found:
            worker.train_step(batch(3))
    assert found.lines == waiting


@pytest.mark.parametrize(
    "wait", [lambda x: x.item(), lambda x: bool((x > 0).all()), lambda x: x[x > 0]]
)
def test_what_waits_is_found(wait: Callable[[torch.Tensor], object]) -> None:
    with Waiting() as found:
        wait(torch.ones(()))
    assert found.lines == ["elsewhere"]
