"""Ranks that hold the same tensors hold the same values: compared once, after every loading.

    data ranks       at the same pipeline and tensor coordinate: all tensors
    tensor ranks     of one line: the tensors of which each has the whole
    pipeline ranks   tied tensors

Each rank tells one number for each of these; only where some differ are all tensors named. Later
nothing is compared: statistics of batch norms differ between data ranks, as their batches do.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from parcompiler.runtime.axis import in_memory
from parcompiler.runtime.channels import Channels
from parcompiler.runtime.gather import shared
from parcompiler.runtime.program import RankProgram

BLOCK = 2**18  # integers that are multiplied at once: they stay in a cache
_ODD = 0x2545F4914F6CDD1D  # the multiplier of xorshift64*


def unequal(
    program: RankProgram, tensors: Mapping[str, Sequence[torch.Tensor]], channels: Channels
) -> str:
    """Which ranks hold other values than they must, the same on all; nothing where none does.

    `tensors` are what this rank holds under each name: a parameter, and its master if it has one.
    A collective of all ranks.
    """
    if program.data == program.tensor == 1 and not program.tied:
        return ""
    compared = [name for name in tensors if _is_compared(program, name)]
    digests = _digests([tensors[name] for name in compared], channels.device)
    numbers = dict(zip(compared, digests, strict=True))
    everyone = channels.told(*(_joined(numbers, names) for names in _sets(program, numbers)))
    pairs = ((k, a, b) for k, a, b in _pairs(program) if everyone[a][k] != everyone[b][k])
    k, first, other = next(pairs, (0, 0, 0))
    if first == other:
        return ""
    text = json.dumps(numbers if program.rank in (first, other) else {})
    texts = shared(text, program.rank, program.size, channels)
    one, two = (json.loads(texts[rank]) for rank in (first, other))
    names = [n for n in _sets(program, one | two)[k] if one.get(n) != two.get(n)]
    return (
        f"ranks {first} and {other} must hold the same weights, and do not ({len(names)} tensors "
        f"differ, the first is {names[0]!r}): seed every rank alike before building the model, or "
        "load the same weights on all of them"
    )


def _sets(program: RankProgram, names: Iterable[str]) -> list[list[str]]:
    """Names of all tensors, of those that tensor ranks have whole, and of each tied one alone."""
    every = sorted(names)
    return [every, [n for n in every if _is_whole(program, n)], *([n] for n in _ties(program))]


def _pairs(program: RankProgram) -> Iterator[tuple[int, int, int]]:
    """The number of such a set, and two ranks that must hold the same under its names."""
    grid = program.grid
    for rank in range(grid.size):
        at = grid.coordinate(rank)
        yield 0, grid.rank(at.pipeline, 0, at.tensor), rank
        yield 1, grid.rank(at.pipeline), rank
        for k, ranks in enumerate(_ties(program).values(), start=2):
            if at.pipeline in ranks:
                yield k, grid.rank(ranks[0], 0, at.tensor), rank


def _ties(program: RankProgram) -> dict[str, tuple[int, ...]]:
    """The pipeline coordinates that hold each tied tensor."""
    return {item.name: item.ranks for item in program.tied.values()}


def _is_whole(program: RankProgram, name: str) -> bool:
    """Whether each tensor rank of a line holds the whole of a tensor."""
    return name not in program.shards and name not in program.rows


def _is_compared(program: RankProgram, name: str) -> bool:
    """Whether other ranks must hold the same under a name."""
    over_lines = program.tensor > 1 and _is_whole(program, name)
    return program.data > 1 or over_lines or name in _ties(program)


def _joined(numbers: Mapping[str, int], names: Iterable[str]) -> int:
    """A number of 60 bits for the numbers of several tensors."""
    text = json.dumps([(name, numbers.get(name)) for name in names])
    return int(hashlib.sha256(text.encode()).hexdigest()[:15], 16)


def _digests(tensors: Sequence[Sequence[torch.Tensor]], device: torch.device) -> list[int]:
    """A number of 64 bits for each group of tensors, by their bytes."""
    if not tensors:
        return []
    factors = _mixed(torch.arange(1, BLOCK + 1, device=device) * _ODD) | 1
    with torch.no_grad():
        every = [
            torch.stack([_folded(words, factors) for tensor in group for words in _words(tensor)])
            for group in tensors
        ]
        return torch.stack([_folded(numbers, factors) for numbers in every]).tolist()


def _words(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The bytes of a tensor as integers: eight by eight, which is fastest, then those left over."""
    flat = in_memory(tensor.detach()).reshape(-1)
    raw = (torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat).view(torch.uint8)
    if raw.storage_offset() % 8:
        raw = raw.clone()
    whole = len(raw) // 8 * 8
    yield raw[:whole].view(torch.int64)
    if whole < len(raw):
        yield raw[whole:].long()


def _folded(words: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """The sum of integers times factors, modulo 2**64, mixed; that of the blocks where it is many.

    As factors are odd, no two blocks have the same that differ in one element.
    """
    if len(words) > BLOCK:
        words = torch.stack([_folded(block, factors) for block in words.split(BLOCK)])
        return _folded(words, factors)
    return _mixed((words * factors[: len(words)]).sum())


def _mixed(numbers: torch.Tensor) -> torch.Tensor:
    """Other numbers for other numbers, whose high bits depend on all bits: elements of two blocks
    would have the same factor else, where their places are exchanged."""
    return (numbers ^ ((numbers >> 29) & (2**35 - 1))) * _ODD
