"""The live memory of a block, counted while it runs on tensors without data.

    live        the storages that operators made and that still exist; views share one
    variables   those of them that variables of the emitted forward hold, if nothing is saved
    saved       those that autograd keeps from the forward to the backward

The backward begins and ends as in a pipeline stage, so that it frees what it has used: the
gradients of the outputs are made at its start, and only it holds them; the gradient of a parameter
is added to an existing one, and is freed.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from parcompiler.again import RunningAgain
from parcompiler.cost.stand_in import stand_in, storages


class LiveMemory:
    """Bytes of the recorded storages that still exist (`now`), and their `peak`.

    A storage counts once for all its views; those from `outside` do not count. Some peaks add bytes
    that live longer in other cases: `peak_with_gradients` the complete gradients of parameters
    (those of the first backward of a step stay; `peak_with_copies` has them in float32 where there
    are masters), `peak_with_outputs` the gradients of the outputs where a caller keeps them to the
    end.

    >>> memory = LiveMemory()
    >>> x = stand_in(torch.empty(8, device="meta"))
    >>> memory.record((x, x.view(2, 4)))
    >>> memory.now, memory.peak
    (32, 32)
    >>> del x
    >>> memory.now, memory.peak
    (0, 32)
    """

    def __init__(self, outside: Iterable[torch.UntypedStorage] = ()) -> None:
        self.now = self.peak = 0
        self.operator_peak = 0  # since `ForwardVariables` set it to `now`
        self.gradients = self.peak_with_gradients = 0
        self.copies = self.peak_with_copies = 0
        self.outputs = self.peak_with_outputs = 0
        self._outside = {id(storage): storage for storage in outside}
        self._counted: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def record(self, result: Any) -> None:
        """Count the storages of a result that are new, until they end."""
        for storage in storages(result):
            key = id(storage)
            if key not in self._counted and key not in self._outside:
                self._counted[key] = weakref.ref(storage, self._ending(key, storage.nbytes()))
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                self.operator_peak = max(self.operator_peak, self.now)
                with_gradients, with_outputs = self.now + self.gradients, self.now + self.outputs
                self.peak_with_gradients = max(self.peak_with_gradients, with_gradients)
                self.peak_with_outputs = max(self.peak_with_outputs, with_outputs)
                self.peak_with_copies = max(self.peak_with_copies, self.now + self.copies)

    def counts(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage is counted."""
        return id(storage) in self._counted

    def restart(self) -> None:
        """Reset the peaks to the present bytes."""
        self.peak = self.peak_with_gradients = self.peak_with_outputs = self.now
        self.peak_with_copies = self.now
        self.gradients = self.copies = self.outputs = 0

    def keep_gradient(self, nbytes: int, copy: int) -> None:
        """Count the gradient of a parameter, which is freed here, in `gradients`, and its copy of
        `copy` bytes in `copies`; where the sizes differ, both exist for a moment."""
        self.gradients += nbytes
        self.copies += copy
        if copy != nbytes:
            self.peak_with_copies = max(self.peak_with_copies, self.now + self.copies)

    def keep_output(self, gradient: torch.Tensor) -> None:
        """Count the gradient of an output in `outputs` once it is freed here."""
        storage = gradient.untyped_storage()
        nbytes = storage.nbytes()

        def ended() -> None:
            self.outputs += nbytes

        weakref.finalize(storage, ended).atexit = False

    def _ending(self, key: int, nbytes: int) -> Callable[[object], None]:
        """A callback for the end of a storage."""

        def ended(_: object) -> None:
            del self._counted[key]
            self.now -= nbytes

        return ended


class ForwardVariables:
    """Peak of the bytes that the variables of a forward hold if nothing is saved for its backward.

    That is the forward of a recomputed block. `overwritten` has for a node the values that its line
    overwrites (see `naming.variables`). Tensors that a composite operator saves within itself count
    until it ends.
    """

    def __init__(
        self, memory: LiveMemory, overwritten: Mapping[fx.Node, Collection[fx.Node]]
    ) -> None:
        self.peak = self._now = 0
        self._memory, self._overwritten = memory, overwritten
        self._variables: Counter[int] = Counter()  # by storage

    def before(self) -> None:
        """Call this before a node runs."""
        self._begin = self._memory.operator_peak = self._memory.now

    def after(self, node: fx.Node, values: dict[fx.Node, Any]) -> None:
        """Call this after a node has run, with its result in `values`; overwritten ones go."""
        self.peak = max(self.peak, self._now + self._memory.operator_peak - self._begin)
        overwritten = [values.pop(other, None) for other in self._overwritten.get(node, ())]
        for value, sign in [(values[node], 1), *((value, -1) for value in overwritten)]:
            for storage in storages(value):
                if self._memory.counts(storage):
                    before = self._variables[id(storage)]
                    self._variables[id(storage)] += sign
                    if 0 in (before, before + sign):
                        self._now += sign * storage.nbytes()


class SavedTensors(RunningAgain):
    """A context that records the tensors which autograd keeps for the backward.

    Operators whose results are dropped save nothing that lasts: call `storages` when only the
    block's outputs are still alive. `peak` is that of the memory when the last tensor was saved.
    """

    def __init__(self, memory: LiveMemory | None = None) -> None:
        super().__init__()
        self.peak = 0
        self._memory = memory
        self._saved: list[weakref.ref[_SavedTensor]] = []

    def storages(self) -> set[torch.UntypedStorage]:
        """Every storage that is still saved, once."""
        alive = (reference() for reference in self._saved)
        return {saved.tensor.untyped_storage() for saved in alive if saved is not None}

    def keep(self, tensor: torch.Tensor) -> _SavedTensor:
        """Record a tensor that is kept."""
        if self._memory is not None:
            self.peak = self._memory.peak
        saved = _SavedTensor(tensor)
        self._saved.append(weakref.ref(saved))
        return saved

    def kept(self, packed: _SavedTensor) -> torch.Tensor:
        """The tensor that `keep` packed."""
        return packed.tensor


class _SavedTensor:
    """One tensor that a node of the autograd graph saves; it dies with the node."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def backward_seed(roots: Sequence[torch.Tensor], memory: LiveMemory) -> torch.Tensor | None:
    """A scalar whose backward makes the gradients of the roots; None where there are no roots."""
    return _Seed.apply(memory, *roots) if roots else None  # type: ignore[no-untyped-call]


class _Seed(torch.autograd.Function):
    """Computes nothing from the roots; its backward makes their gradients."""

    @staticmethod
    def forward(ctx: Any, memory: LiveMemory, *roots: torch.Tensor) -> torch.Tensor:
        ctx.memory, ctx.likes = memory, [stand_in(root) for root in roots]
        seed: torch.Tensor = stand_in(torch.empty((), device="meta"))
        return seed

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients = tuple(map(torch.empty_like, ctx.likes))
        for gradient in gradients:
            ctx.memory.keep_output(gradient)
        return None, *gradients


def free_gradients(
    parameters: Mapping[fx.Node, torch.Tensor], memory: LiveMemory, masters: Collection[str]
) -> None:
    """Make the backward free gradients of parameters as soon as they are complete; those of
    parameters in `masters` may be copied to float32 before."""
    for node, parameter in parameters.items():
        if parameter.requires_grad:
            placeholder: torch.Tensor = stand_in(parameter.detach())
            wide = torch.float32 if node.name in masters else parameter.dtype

            def free(
                gradient: torch.Tensor,
                other: torch.Tensor = placeholder,
                copy: int = parameter.numel() * wide.itemsize,
            ) -> torch.Tensor:
                memory.keep_gradient(gradient.numel() * gradient.itemsize, copy)
                return other

            parameter.register_hook(free)
