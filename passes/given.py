"""Divisions that the user asks for: equal numbers of layers, or block counts by stage."""

from __future__ import annotations

from collections.abc import Sequence

from parcompiler.capture.blocks import why_so_few
from parcompiler.errors import InputError
from parcompiler.graph import Block
from parcompiler.problem import Problem


def division(
    problem: Problem, wanted: str | Sequence[int], stages: int
) -> tuple[int, tuple[int, ...]]:
    """The granularity and the stage of each block for `stages="even"` or counts.

    Raises InputError when there are too few layers, or counts that fit no granularity.
    """
    if isinstance(wanted, str):
        return _even(problem, stages)
    if len(wanted) != stages:
        message = (
            f"stages has {len(wanted)} counts for {stages} pipeline stages: give one count for each"
        )
        raise InputError(message)
    numbers = {}
    for level in problem.levels:
        blocks = problem.priced(level).cut.blocks
        if len(blocks) == sum(wanted):
            return level, tuple(j for j, count in enumerate(wanted) for _ in range(count))
        numbers[level] = len(blocks)
    counts = " or ".join(str(n) for n in dict.fromkeys(numbers.values()))
    message = (
        f"the counts {tuple(wanted)} add up to {sum(wanted)} blocks, but the model has {counts}: "
        + ", ".join(block.name for block in problem.priced(1).cut.blocks[:12])
    )
    raise InputError(message)


def _even(problem: Problem, stages: int) -> tuple[int, tuple[int, ...]]:
    """Equal numbers of layers, as in Megatron-LM: blocks before the first layer go with it, blocks
    after a layer with that layer. The first stages take the remainder.

    Where layers divide evenly only with two more, embedding and head count as a layer each, as in
    Llama 3 405B (arXiv 2407.21783, section 3.3.2) and the zero-bubble papers (2401.10241)."""
    most = 0
    for level in problem.levels:
        layers = [is_layer(block) for block in problem.priced(level).cut.blocks]
        if level == problem.levels[0]:
            layers = _with_ends(layers, stages)
        if sum(layers) >= stages:
            return level, _spread(layers, stages)
        most = max(most, sum(layers))
    message = f"more stages than layers ({stages} > {most}): use fewer pipeline ranks"
    error = InputError(message)
    error.add_note(why_so_few(problem.graph))
    raise error


def is_layer(block: Block) -> bool:
    """Whether a block is a numbered module of the model or part of one."""
    return bool(block.scope)


def _with_ends(layers: list[bool], stages: int) -> list[bool]:
    """Which blocks count as layers: also those at the ends, if layers divide evenly only with them.

    >>> _with_ends([False, True, True, False], 4), _with_ends([False, True, True, False], 2)
    ([True, True, True, True], [False, True, True, False])
    """
    count = sum(layers)
    if count % stages == 0 or (count + 2) % stages or layers[0] or layers[-1]:
        return layers
    last = len(layers) - layers[::-1].index(True)
    return [True, *layers[1:last], True, *layers[last + 1 :]]


def _spread(layers: Sequence[bool], stages: int) -> tuple[int, ...]:
    """The stage of each block when the layers are dealt out evenly."""
    each, more = divmod(sum(layers), stages)
    dealt = [j for j in range(stages) for _ in range(each + (j < more))]
    lengths, count = [], 0
    for layer in layers:
        count += layer
        lengths.append(dealt[max(count, 1) - 1])
    return tuple(lengths)
