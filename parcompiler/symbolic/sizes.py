"""Which sizes of a captured model are symbols: the batch, and the length of what it reads.

| symbol | word     | is                                                             |
|--------|----------|----------------------------------------------------------------|
| b      | batch    | the rows of the inputs: their first dimension                  |
| s      | sequence | the second dimension of inputs that are integers (tokens)      |
| s2, …  | target   | the same where other inputs have another length (the labels of |
|        |          | an encoder-decoder)                                            |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from parcompiler.capture import capture
from parcompiler.capture.inputs import Batch, flat, with_tensors
from parcompiler.capture.modes import in_modes
from parcompiler.graph import BatchInput, Graph


class Unfit(Exception):
    """A graph has no copy, or no formulas, at other sizes; the text says why."""


@dataclass(frozen=True, slots=True)
class InputSize:
    """A size that may change: its letter, the word users give it by, and its number now.

    `places` are the dimensions of inputs that have it: the placeholder, and its dimension.
    """

    letter: str
    word: str
    now: int
    places: tuple[tuple[str, int], ...]


Sizes = Mapping[str, int]  # the number of each letter
CaptureAt = Callable[[Sizes], Graph]  # captures the model at these sizes


def sizes_of(graph: Graph) -> tuple[InputSize, ...]:
    """The sizes that the inputs of a graph show; the batch first."""
    return (*_batch(graph), *_sequences(graph))


def batch_of(graph: Graph) -> InputSize:
    """The rows of a micro-batch. Raises Unfit where the inputs share none."""
    batch = next(iter(_batch(graph)), None)
    if batch is None:
        message = "the inputs have no rows"
        raise Unfit(message)
    other = [item for item in graph.inputs if item.shape and (item.node, 0) not in batch.places]
    if other:
        message = f"the inputs share no rows ({other[0].key!r} has {other[0].shape[0]})"
        raise Unfit(message)
    return batch


def subsets(known: tuple[InputSize, ...]) -> Iterator[tuple[InputSize, ...]]:
    """The sizes to try as symbols: all, the batch alone, the lengths alone, none."""
    batch = tuple(size for size in known if size.letter == "b")
    lengths = tuple(size for size in known if size.letter != "b")
    yield from dict.fromkeys((known, batch, lengths, ()))


def capture_at(
    model: nn.Module,
    graph: Graph,
    sizes: Sequence[InputSize],
    loss: Callable[[Any], torch.Tensor] | None,
) -> CaptureAt:
    """Captures `model` on the sample of its graph, repeated or cut to other sizes; once at each."""
    captured: dict[tuple[tuple[str, int], ...], Graph] = {}

    def again(numbers: Sizes) -> Graph:
        key = tuple(numbers.items())
        if key not in captured:
            with in_modes(model, graph.modes):
                captured[key] = capture(model, sample_at(graph, sizes, numbers), loss)
        return captured[key]

    return again


def sample_at(graph: Graph, sizes: Sequence[InputSize], numbers: Sizes) -> Batch:
    """The sample that a graph was captured on, repeated or cut to other numbers of some sizes."""
    keys = {item.node: item.key for item in graph.inputs}
    tensors = {key: leaf for key, leaf in flat(graph.sample) if isinstance(leaf, torch.Tensor)}
    for size in sizes:
        for node, dim in size.places:
            value = tensors[keys[node]]
            rows = torch.arange(numbers.get(size.letter, size.now), device=value.device)
            tensors[keys[node]] = value.index_select(dim, rows % value.shape[dim])
    args, kwargs = with_tensors(graph.sample, tensors)
    return kwargs or args


def _batch(graph: Graph) -> list[InputSize]:
    """The first dimension that most inputs have."""
    counted = Counter(item.shape[0] for item in graph.inputs if item.shape)
    if not counted:
        return []
    rows = max(counted, key=lambda size: counted[size])
    places = tuple((item.node, 0) for item in graph.inputs if item.shape[:1] == (rows,))
    return [InputSize("b", "batch", rows, places)]


def _sequences(graph: Graph) -> list[InputSize]:
    """The second dimensions of tokens, and of the masks that are as long."""
    lengths = [item.shape[1] for item in graph.inputs if _is_tokens(item)]
    sizes = []
    for number, length in enumerate(dict.fromkeys(lengths)):
        letter = f"s{number + 1}" if number else "s"
        word = ("sequence", "target")[number] if number < 2 else f"length_{number + 1}"
        places = [
            (item.node, dim)
            for item in graph.inputs
            for dim in range(1, len(item.shape))
            if item.shape[dim] == length and (dim == 1 or not item.dtype.is_floating_point)
        ]
        sizes.append(InputSize(letter, word, length, tuple(places)))
    return sizes


def _is_tokens(item: BatchInput) -> bool:
    """Whether an input is [rows, sequence] of integers."""
    integers = (torch.int64, torch.int32)
    return len(item.shape) == 2 and item.dtype in integers and item.shape[1] > 1
