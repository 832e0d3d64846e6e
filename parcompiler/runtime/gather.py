"""What all ranks have: the whole model's tensors on rank 0, and short texts on every rank."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import torch

from parcompiler.runtime.axis import in_memory
from parcompiler.runtime.channels import Channels


def gather(
    tensors: Mapping[str, torch.Tensor], rank: int, sources: Sequence[int], channels: Channels
) -> dict[str, torch.Tensor] | None:
    """On rank 0 all tensors of it and `sources` by name, on the CPU; None elsewhere. A collective.

    Of ranks that hold the same, one is a source.
    """
    if rank in sources:
        _send(tensors, channels)
    if rank != 0:
        return None
    found = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
    for source in sources:
        for name, tensor in _receive(source, channels).items():
            found.setdefault(name, tensor)  # copies of a tied tensor are equal
    return found


def shared(text: str, rank: int, size: int, channels: Channels) -> list[str]:
    """The texts of all ranks, on every rank. A collective."""
    own = list(text.encode())
    lengths = torch.zeros(size, dtype=torch.int64, device=channels.device)
    lengths[rank] = len(own)
    channels.total(lengths)
    whole = torch.zeros(int(lengths.sum()), dtype=torch.uint8, device=channels.device)
    parts = whole.split(lengths.tolist())
    parts[rank].copy_(torch.tensor(own, dtype=torch.uint8))
    channels.total(whole)
    return [bytes(part.tolist()).decode() for part in parts]


def _send(tensors: Mapping[str, torch.Tensor], channels: Channels) -> None:
    """Send names, shapes and dtypes as JSON, then the tensors, to rank 0."""
    device = channels.device
    kinds = [[n, list(t.shape), str(t.dtype).removeprefix("torch.")] for n, t in tensors.items()]
    header = torch.tensor(list(json.dumps(kinds).encode()), dtype=torch.uint8, device=device)
    channels.send_now(torch.tensor([header.numel()], device=device), 0)
    channels.send_now(header, 0)
    for tensor in tensors.values():
        if tensor.numel():
            channels.send_now(in_memory(tensor.detach().to(device)), 0)


def _receive(source: int, channels: Channels) -> dict[str, torch.Tensor]:
    """What `_send` on rank `source` sends."""
    device = channels.device
    length = channels.receive_now(torch.zeros(1, dtype=torch.int64, device=device), source)
    header = torch.zeros(int(length), dtype=torch.uint8, device=device)
    channels.receive_now(header, source)
    found = {}
    for name, shape, dtype in json.loads(bytes(header.tolist())):
        tensor = torch.zeros(shape, dtype=getattr(torch, dtype), device=device)
        if tensor.numel():
            channels.receive_now(tensor, source)
        found[name] = tensor.cpu()
    return found
