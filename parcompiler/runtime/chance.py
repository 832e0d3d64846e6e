"""Random operators under pipelines: the same draws however the step is scheduled.

    seeded   training: each forward draws from its own (seed, step, stage, micro-batch)
    Chance   proofs: each draw has its own (seed, micro-batch, operator, number)

Neither touches the generator that the user's own code draws from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self
from zlib import crc32

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

    Afterwards the generator is as before. Draws are numbered per operator, in the model's order:
    `draws[name]` counts them. A stage that holds only some of the model's is told the `numbers` of
    its own. An operator that leaves the generator alone (attention without dropout) made no draw.
    """

    def __init__(
        self, seed: int, microbatch: int, numbers: Mapping[str, Sequence[int]] | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.draws: Counter[str] = Counter()
        self._key = (seed, microbatch)
        self._numbers = numbers
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
        """Run `func`, after seeding when it may draw random numbers."""
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        name = str(func)
        seed = mixed(*self._key, crc32(name.encode()), self._number(name))
        torch.default_generator.manual_seed(seed)
        before = torch.get_rng_state()
        result = func(*args, **(kwargs or {}))
        self.draws[name] += not torch.equal(before, torch.get_rng_state())
        return result

    def _number(self, name: str) -> int:
        """The number, in the whole model, of the next draw by an operator."""
        count = self.draws[name]
        if self._numbers is None:
            return count
        own = self._numbers.get(name, ())
        return own[count] if count < len(own) else -1
