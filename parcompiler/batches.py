"""Batches that a model takes: random ones, the inputs it was compiled with, and their pieces."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from parcompiler.capture.inputs import flat
from parcompiler.graph import Graph


def random_batch(graph: Graph, microbatches: int, seed: int) -> dict[str, torch.Tensor]:
    """A batch by keys: normal floats, integers below their bounds; what has no bound and what is
    0 or 1 everywhere (masks) is repeated from the inputs that the model was compiled with."""
    generator = torch.Generator().manual_seed(seed)
    examples = dict(flat(graph.sample))
    found = {}
    for item in graph.inputs:
        example = examples.get(item.key)
        shape = (item.shape[0] * microbatches, *item.shape[1:]) if item.shape else ()
        if example is not None and not example.is_meta and _is_fixed(example, item.high):
            repeated = torch.cat([example] * microbatches) if item.shape else example
            found[item.key] = repeated.detach().to(item.dtype)
        elif item.dtype.is_floating_point or item.dtype.is_complex:
            kind = torch.complex64 if item.dtype.is_complex else torch.float32
            drawn = torch.randn(shape, generator=generator, dtype=kind)
            found[item.key] = drawn.to(item.dtype)
        else:
            high = 2 if item.high is None else item.high
            found[item.key] = torch.randint(0, high, shape, generator=generator).to(item.dtype)
    return found


def given_batch(graph: Graph, microbatches: int) -> dict[str, torch.Tensor] | None:
    """The inputs that the model was compiled with as every micro-batch; None if they are meta."""
    examples = dict(flat(graph.sample))
    found = {}
    for item in graph.inputs:
        example = examples.get(item.key)
        if example is None or example.is_meta:
            return None
        whole = torch.cat([example] * microbatches) if item.shape else example
        found[item.key] = whole.detach().cpu().to(item.dtype)
    return found


def piece(graph: Graph, batch: Mapping[str, torch.Tensor], i: int) -> dict[str, torch.Tensor]:
    """Copies of the tensors of micro-batch `i` by key: a model may update them in place."""
    rows = {item.key: item.shape[:1] for item in graph.inputs}
    return {
        key: (batch[key].narrow(0, i * some[0], some[0]) if some else batch[key]).clone()
        for key, some in rows.items()
    }


def _is_fixed(example: torch.Tensor, high: int | None) -> bool:
    """Whether random values could be invalid in the place of an example's."""
    binary = bool(((example == 0) | (example == 1)).all())
    return example.dtype == torch.bool or (binary and (high is None or high <= 2))
