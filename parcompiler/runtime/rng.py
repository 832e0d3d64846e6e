"""Random operators under pipelines: draws that do not depend on the schedule.

    seeded        training: each forward draws from its own (seed, step, stage, micro-batch)
    SeededDraws   verification: each draw has its own (seed, micro-batch, operator, number)

Neither changes the state of the generator for the user's own code. Tensor ranks draw equal numbers,
except for values they hold pieces of: `own_draws` gives each rank different numbers, and in a
verification its piece of the draw for the whole tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, Token
from functools import partial
from typing import Any, Self
from zlib import crc32

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from parcompiler.pieces import Shard
from parcompiler.runtime.axis import Axis
from parcompiler.runtime.axis import current as current_axis
from parcompiler.runtime.compiled import tracing

_CUDA_DROPOUT = torch.ops.aten.native_dropout.default
_MODULUS = 2**63 - 25  # seeds are non-negative 63-bit integers


def mixed(*numbers: int) -> int:
    """One seed from several numbers; different numbers give different seeds."""
    seed = 0
    for number in numbers:
        seed = (seed * 6_364_136_223_846_793_005 + number + 1_442_695_040_888_963_407) % _MODULUS
    return seed


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """In this context, random operators draw from `seed`; afterwards the generator is as before."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


@contextmanager
def own_draws(
    dim: int, sizes: tuple[int, ...] | None = None, axis: str = "tensor", zigzag: bool = False
) -> Iterator[None]:
    """In this context, an operator draws random numbers for this rank's piece along `dim`.

    `sizes` are the segments of the whole dimension; None: all ranks hold equally much.
    """
    if (trace := tracing.active()) is not None:
        with trace.drawing(partial(own_draws, dim, sizes, axis, zigzag)):
            yield
        return
    group, draws = current_axis(axis), _active.get()
    if draws is not None:
        with draws.drawing_pieces(group, dim, sizes, zigzag):
            yield
        return
    # All ranks draw once from the shared generator, so that they still agree afterwards.
    seed = mixed(int(torch.randint(2**62, (), device="cpu")), group.rank)
    with seeded(seed, group.device):
        yield


_active: ContextVar[SeededDraws | None] = ContextVar("seeded draws", default=None)


def current() -> SeededDraws | None:
    """The active draws of a verification; None outside of one."""
    return _active.get()


class SeededDraws(TorchDispatchMode):
    """Seeds the CPU's generator before every random operator of one micro-batch, on whatever
    device.

    Afterwards the generator is as before. Draws are numbered per operator, in the model's order:
    `counts[name]` counts them. A stage that holds only some of the model's operators is given the
    `numbers` of its draws. An operator that does not advance the generator (attention without
    dropout) made no draw.
    """

    def __init__(
        self, seed: int, microbatch: int, numbers: Mapping[str, Sequence[int]] | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()
        self._key = (seed, microbatch)
        self._numbers = numbers
        self._before: list[torch.Tensor] = []
        self._tokens: list[Token[SeededDraws | None]] = []
        # Outermost first.
        self._pieces: list[tuple[Axis, int, tuple[int, ...] | None, bool]] = []

    def resumed(self) -> SeededDraws:
        """A copy that makes the same draws from here on."""
        twin = SeededDraws(*self._key, self._numbers)
        twin.counts.update(self.counts)
        return twin

    @contextmanager
    def drawing_pieces(
        self, axis: Axis, dim: int, sizes: tuple[int, ...] | None, zigzag: bool
    ) -> Iterator[None]:
        """In this context, a draw is this rank's piece of the draw for the whole tensor."""
        self._pieces.append((axis, dim, sizes, zigzag))
        try:
            yield
        finally:
            self._pieces.pop()

    def __enter__(self) -> Self:
        """Save the state of the generator."""
        self._before.append(torch.get_rng_state())
        self._tokens.append(_active.set(self))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        """Restore the state of the generator."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        _active.reset(self._tokens.pop())
        torch.set_rng_state(self._before.pop())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`, after seeding when it may draw random numbers."""
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        if func is _CUDA_DROPOUT:
            return self._dropout(*args)
        name = str(func)
        seed = mixed(*self._key, crc32(name.encode()), self._number(name))
        torch.default_generator.manual_seed(seed)
        before = torch.get_rng_state()
        result = self._draw(func, args, kwargs or {})
        self.counts[name] += not torch.equal(before, torch.get_rng_state())
        return result

    def _dropout(self, x: torch.Tensor, p: float, train: bool | None) -> Any:
        """CUDA's dropout kernel, computed from a draw of the CPU."""
        if train is False or not 0.0 < p < 1.0:
            return _CUDA_DROPOUT(x, p, train)
        noise, kept = torch.empty_like(x), torch.ops.aten.bernoulli_.float
        self.__torch_dispatch__(kept, (), (noise, 1 - p))
        return x * (noise / (1 - p)), noise.bool()

    def _draw(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of a random operator; for a piece, that piece of the whole tensor's draw."""
        is_mutable, func = func._schema.is_mutable, partial(_drawn_on_cpu, func)
        if not self._pieces:
            return func(*args, **kwargs)
        part = whole = args[0]
        shards = []
        for axis, dim, sizes, zigzag in reversed(self._pieces):
            shard = Shard(dim, sizes or (whole.shape[dim] * axis.size,), zigzag)
            shards.append((axis, shard))
            if is_mutable:  # its values are replaced
                whole = _alike(whole, shard.shape(whole.shape))
            else:
                whole = axis.all_gather(whole, shard)
        made = func(whole, *args[1:], **kwargs)
        for axis, shard in reversed(shards):
            made = pytree.tree_map(partial(axis.own, shard=shard), made)
        return part.copy_(made) if is_mutable else made

    def _number(self, name: str) -> int:
        """The number, in the whole model, of the next draw by an operator."""
        count = self.counts[name]
        if self._numbers is None:
            return count
        numbers = self._numbers.get(name, ())
        return numbers[count] if count < len(numbers) else -1


def _drawn_on_cpu(func: Any, *args: Any, **kwargs: Any) -> Any:
    """The result of a random operator on any device, drawn by the CPU's generator."""
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    device = tensors[0].device if tensors else torch.device(kwargs.get("device") or "cpu")
    if device.type == "cpu":
        return func(*args, **kwargs)
    if "device" in kwargs:
        kwargs["device"] = "cpu"
    on_cpu = pytree.tree_map_only(torch.Tensor, lambda x: x.cpu(), (args, kwargs))
    made = func(*on_cpu[0], **on_cpu[1])
    if func._schema.is_mutable:
        return tensors[0].copy_(made)
    return pytree.tree_map_only(torch.Tensor, lambda x: x.to(device), made)


def _alike(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """An empty tensor of another shape whose dimensions lie in the same order in memory."""
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
    made = tensor.new_empty([shape[dim] for dim in order])
    return made.permute([order.index(dim) for dim in range(len(order))])
