"""The list of operators that run, without data, below autograd while the recorder is entered."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from parcompiler.cost.alive import Alive
from parcompiler.cost.operation import Operation, describe
from parcompiler.cost.stand_in import run


class Recorder(TorchDispatchMode):
    """Notes every operator that costs something, in the order of execution, and what is `alive`."""

    def __init__(self, alive: Alive | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Operation] = []
        self.alive = alive or Alive()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one operator on meta tensors, and note it."""
        result = run(func, args, kwargs or {})
        self.alive.note(result)
        self.add(describe(func, args, kwargs or {}, result))
        return result

    def add(self, operation: Operation | None) -> None:
        """Note one operation; None stands for one that costs nothing."""
        if operation is not None:
            self.operations.append(operation)

    def take(self) -> tuple[Operation, ...]:
        """What was noted since the last call."""
        taken, self.operations = tuple(self.operations), []
        return taken
