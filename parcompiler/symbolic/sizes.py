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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from parcompiler.graph import Graph, Input

Place = tuple[str, int]  # the placeholder of an input, and a dimension of it


@dataclass(frozen=True, slots=True)
class Size:
    """A size that may change: its letter, the word users give it by, and its number now.

    `places` are the dimensions of inputs that have it.
    """

    letter: str
    word: str
    now: int
    places: tuple[Place, ...]


Sizes = Mapping[str, int]  # the number of each letter


def sizes_of(graph: Graph) -> tuple[Size, ...]:
    """The sizes that the inputs of a graph show; the batch first."""
    return (*_batch(graph), *_sequences(graph))


def now(sizes: Iterable[Size]) -> dict[str, int]:
    """The numbers of the capture."""
    return {size.letter: size.now for size in sizes}


def _batch(graph: Graph) -> list[Size]:
    """The first dimension that most inputs have."""
    counted = Counter(item.shape[0] for item in graph.inputs if item.shape)
    if not counted:
        return []
    rows = max(counted, key=lambda size: counted[size])
    places = tuple((item.node, 0) for item in graph.inputs if item.shape[:1] == (rows,))
    return [Size("b", "batch", rows, places)]


def _sequences(graph: Graph) -> list[Size]:
    """The second dimensions of tokens, and of the masks that are as long."""
    lengths = [item.shape[1] for item in graph.inputs if _is_tokens(item)]
    found = []
    for number, length in enumerate(dict.fromkeys(lengths)):
        letter = f"s{number + 1}" if number else "s"
        word = ("sequence", "target")[number] if number < 2 else f"length_{number + 1}"
        places = [
            (item.node, dim)
            for item in graph.inputs
            for dim in range(1, len(item.shape))
            if item.shape[dim] == length and (dim == 1 or not item.dtype.is_floating_point)
        ]
        found.append(Size(letter, word, length, tuple(places)))
    return found


def _is_tokens(item: Input) -> bool:
    """Whether an input is [rows, sequence] of integers."""
    integers = (torch.int64, torch.int32)
    return len(item.shape) == 2 and item.dtype in integers and item.shape[1] > 1
