"""The sizes of a captured model that are symbols: the batch, and the lengths of its inputs.

| symbol | word     | is                                                             |
|--------|----------|----------------------------------------------------------------|
| b      | batch    | the rows of the inputs: their first dimension                  |
| s      | sequence | the second dimension of inputs that are integers (tokens)      |
| s2, …  | target   | the same where other inputs have another length (the labels of |
|        |          | an encoder-decoder)                                            |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from parcompiler.capture.inputs import Batch, flat, with_tensors
from parcompiler.errors import ParcompilerError
from parcompiler.graph import BatchInput, Graph
from parcompiler.passes.shard.axes import on_axes
from parcompiler.problem import Problem, prepared


class Unfit(Exception):
    """A model has no graph, or no formulas, at other sizes; the text says why."""


@dataclass(frozen=True, slots=True)
class InputSize:
    """A size that may change: its letter, its word for users, and its current number.

    `places` are the dimensions of inputs that have it: the placeholder, and its dimension.
    """

    letter: str
    word: str
    now: int
    places: tuple[tuple[str, int], ...]


Sizes = Mapping[str, int]  # the number of each letter


def sizes_of(graph: Graph) -> tuple[InputSize, ...]:
    """The sizes found in the inputs of a graph, the batch first."""
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


def resized(problem: Problem, sizes: Sequence[InputSize], numbers: Sizes) -> Problem:
    """The problem of the model captured again at other numbers of some sizes, without measurements.
    Raises Unfit if the model cannot be captured there."""
    graph, options = problem.graph, problem.options
    if all(numbers[size.letter] == size.now for size in sizes):
        return problem

    def captured() -> Graph:
        if graph.recapture is None:
            message = "its graph was not captured from a model"
            raise Unfit(message)
        try:
            again = graph.recapture(sample_at(graph, sizes, numbers))
        except ParcompilerError as error:
            raise Unfit(str(error)) from error
        return prepared(again, options, problem.mesh, options.dtype)

    key = "at sizes", *(numbers[size.letter] for size in sizes)
    whole = problem.anew(graph=graph.once(key, captured), bench=None, context=None)
    try:
        return on_axes(whole)
    except ParcompilerError as error:  # ranks cannot share these rows
        raise Unfit(str(error)) from error


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
