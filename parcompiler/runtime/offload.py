"""Layers whose activations wait for their backward in the host's memory.

    compute   F0 │ F1        │ F2        │ ..   B2               │ B1        │ B0
    copies       │ 0 ─► host │ 1 ─► host │      2, 1 ◄─ host     │ 0 ◄─ host │

Saved tensors are copied once the forward has written them, and their memory is free when the next
of these layers, or the stage, has run. A layer's backward fetches all of its copies at once, and
those of the layer before, which arrive beside it. On CUDA copies go to pinned memory, on their own
stream; a CPU copies synchronously. Parameters, buffers and leaves of the stage's graph stay on the
device. (torchtune's and torchao's `OffloadActivations` does the same tensor by tensor.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn

from parcompiler.again import RunningAgain
from parcompiler.temporary import having

_active: ContextVar[Transfers | None] = ContextVar("transfers", default=None)


def offloaded(layer: nn.Module, *tensors: torch.Tensor) -> Any:
    """`layer(*tensors)`, whose saved tensors wait for the backward in the host's memory."""
    transfers = _active.get()
    if transfers is None or not torch.is_grad_enabled():
        return layer(*tensors)
    copies = _LayerCopies(layer, tensors, transfers)
    with copies:
        outputs = layer(*tensors)
    transfers.follow(copies)
    return outputs


@contextmanager
def transfers() -> Iterator[None]:
    """Context of a stage's forward: at its end all that `offloaded` layers saved has left the
    device."""
    scope = Transfers()
    with having(_active, scope):
        yield
        scope.follow(None)


class Transfers:
    """The copies of one forward; `last` are those of the layer that ran last."""

    def __init__(self) -> None:
        self.last: _LayerCopies | None = None
        self.made: WeakKeyDictionary[torch.UntypedStorage, ref[HostCopy]] = WeakKeyDictionary()

    def follow(self, copies: _LayerCopies | None) -> None:
        """Free the device memory of the previous layer's copies, made beside this layer."""
        if self.last is not None:
            self.last.leave()
        self.last = copies


class HostCopy:
    """The bytes of a tensor's storage in the host's memory, and again on the device while `back` is
    set."""

    def __init__(self, tensor: torch.Tensor) -> None:
        storage, self.device = tensor.untyped_storage(), tensor.device
        self._version, self._counter = tensor._version, tensor.detach()
        self._counter.data = tensor.new_empty(0)  # shares the version counter only
        self.back: torch.Tensor | None = None
        self._ready: torch.Event | None = None
        whole = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)
        with _beside(self.device):
            self.host = to_host(whole)

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor of this storage still has these bytes. Chunks of one storage, such as
        gates of a recurrent layer, are changed in place, each with its own version counter."""
        if not self._version == self._counter._version == tensor._version:
            return False
        with torch.autograd._unsafe_preserve_version_counter(tensor):
            torch.autograd.graph.increment_version(tensor)
            return self._counter._version > self._version

    def fetch(self) -> None:
        """Start copying the bytes back to the device."""
        if self.back is None:
            back = torch.empty(len(self.host), dtype=torch.uint8, device=self.device)
            with _beside(self.device) as stream:
                self.back = back.copy_(self.host, non_blocking=True)
            self._ready = stream.record_event() if stream is not None else None

    def storage(self) -> torch.UntypedStorage:
        """The bytes on the device."""
        self.fetch()
        self._arrive()
        assert self.back is not None
        return self.back.untyped_storage()

    def _arrive(self) -> None:
        """Make the compute stream wait for the bytes."""
        if self._ready is not None:
            self._ready.wait(torch.cuda.current_stream(self.device))
            self._ready = None

    def __del__(self) -> None:
        """Wait for bytes that were never read, so that their memory can be freed."""
        self._arrive()


class _LayerCopies(RunningAgain):
    """In this context tensors saved for the backward go to the host; `before` is the previous
    layer."""

    def __init__(
        self, layer: nn.Module, inputs: Sequence[torch.Tensor], transfers: Transfers
    ) -> None:
        super().__init__()
        leaves = (tensor for tensor in inputs if tensor.is_leaf)
        stay = (*layer.parameters(), *layer.buffers(), *leaves)
        self._stay = {tensor.untyped_storage()._cdata for tensor in stay}
        self._known, self.before = transfers.made, transfers.last
        self._leaving: list[torch.UntypedStorage] = []
        self._copies: list[ref[HostCopy]] = []  # the backward frees each after its last use
        self._left: torch.Event | None = None

    def leave(self) -> None:
        """Free the memory on the device; later work of the compute stream waits for the copies."""
        if self._left is not None:
            self._left.wait()
        self._leaving.clear()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._stay.clear()
        for storage in self._leaving[-1:]:
            if storage.device.type == "cuda":
                self._left = _stream(storage.device).record_event()

    def keep(self, tensor: torch.Tensor) -> Any:
        """Pack a saved tensor: its place in a copy, or the tensor itself if it stays on the
        device."""
        storage = tensor.untyped_storage()
        plain = tensor.layout is torch.strided and not (tensor.is_conj() or tensor.is_neg())
        if not plain or storage._cdata in self._stay or not storage.nbytes():
            return tensor
        known = self._known.get(storage)
        copy = known() if known is not None else None
        if copy is None or not copy.is_of(tensor):
            copy = HostCopy(tensor)
            self._known[storage] = ref(copy)
            self._leaving.append(storage)
        self._copies.append(ref(copy))
        place = tensor.storage_offset(), tensor.shape, tensor.stride()
        return self, copy, tensor.dtype, place

    def kept(self, packed: Any) -> torch.Tensor:
        """Unpack what `keep` returned; the first call fetches all of the layer, and of the one
        before."""
        if isinstance(packed, torch.Tensor):
            return packed
        copies, copy, dtype, place = packed
        for layer in (copies, copies.before):
            if layer is not None:
                layer.fetch()
        tensor = torch.empty(0, dtype=dtype, device=copy.device)
        return tensor.set_(copy.storage(), *place)

    def fetch(self) -> None:
        """Start copying back all that is still needed."""
        for known in self._copies:
            if (copy := known()) is not None:
                copy.fetch()
        self._copies.clear()


def to_host(whole: torch.Tensor) -> torch.Tensor:
    """A copy of some bytes in the host's memory; from CUDA it is pinned and asynchronous."""
    host = torch.empty(len(whole), dtype=torch.uint8, pin_memory=whole.is_cuda)
    return host.copy_(whole, non_blocking=True)


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of a device's copies."""
    return torch.cuda.Stream(device)


@contextmanager
def _beside(device: torch.device) -> Iterator[torch.cuda.Stream | None]:
    """In this context copies follow the compute issued so far, on the yielded stream; None on a
    CPU."""
    if device.type != "cuda":
        yield None
        return
    stream = _stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield stream
