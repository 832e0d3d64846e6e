"""Random operators under pipelines: the same draws however the step is scheduled.

    seeded   training: each forward draws from its own (seed, step, stage, micro-batch)
    Chance   proofs: each random operator draws from its own (seed, micro-batch, position)

Neither touches the generator that the user's own code draws from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_MODULUS = 2**63 - 25  # seeds are non-negative 63-bit integers


def mixed(*numbers: int) -> int:
    """One seed from several numbers; different numbers give different seeds."""
    seed = 0
    for number in numbers:
        seed = (seed * 6_364_136_223_846_793_005 + number + 1_442_695_040_888_963_407) % _MODULUS
    return seed


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Within it, random operators draw from `seed`; afterwards the generator is as before."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        _seed(seed, device)
        yield


def _seed(seed: int, device: torch.device) -> None:
    """Seed the generators that operators on `device` draw from, and no others."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


class Chance(TorchDispatchMode):
    """Seeds the CPU's generator before every random operator of one micro-batch.

    Afterwards the generator is as before. A stage that holds only some of the model's random
    operators is told their `positions`.
    """

    def __init__(self, seed: int, microbatch: int, positions: Sequence[int] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._key = (seed, microbatch)
        self._positions: Iterator[int] = count() if positions is None else iter(positions)
        self._before: list[torch.Tensor] = []

    def __enter__(self) -> Self:
        """Keep the state of the generator."""
        self._before.append(torch.get_rng_state())
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        """Give the generator its state back."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        torch.set_rng_state(self._before.pop())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`, after seeding when it draws random numbers."""
        if torch.Tag.nondeterministic_seeded in func.tags:
            torch.default_generator.manual_seed(mixed(*self._key, next(self._positions)))
        return func(*args, **(kwargs or {}))
