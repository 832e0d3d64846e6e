"""What ranks compare with each other, so that none goes on alone or computes something else.

    at the start           the program, and the scripts and weights of the exported folder
    before a call          training or evaluation, the number of micro-batches, digests of batches
    after every loading    the weights that several ranks must have alike:
        data ranks             at the same pipeline and tensor coordinate: all tensors
        tensor ranks           of one group: the tensors of which each has the whole
        pipeline ranks         tied tensors

Each rank gives one number for each of these; only where some differ are all tensors named. Later
no weights are compared: statistics of batch norms differ between data ranks, as their batches do.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from parcompiler.errors import LaunchError
from parcompiler.runtime.axis import in_memory, real
from parcompiler.runtime.channels import Channels
from parcompiler.runtime.files import Fingerprint
from parcompiler.runtime.program import RankProgram

BLOCK = 2**18  # integers that are multiplied at once: they stay in a cache
_ODD = 0x2545F4914F6CDD1D  # the multiplier of xorshift64*


def check_programs(program: RankProgram, files: Fingerprint, channels: Channels) -> None:
    """Raise LaunchError on every rank unless all ranks have the same program and files."""
    ranks = channels.gather_numbers(int(program.digest, 16), int(files.digest, 16))
    others = [rank for rank, numbers in enumerate(ranks) if numbers != ranks[0]]
    if others:
        same = ranks[others[0]][0] == ranks[0][0]
        edited = f"; edited on this rank: {', '.join(files.edited)}" if files.edited else ""
        message = (
            f"the ranks run different {'scripts or weights' if same else 'programs'} (rank "
            f"{others[0]} has others than rank 0{edited}): export once, start all ranks from "
            "copies of that folder"
        )
        raise LaunchError(message)


class WorkerCall(NamedTuple):
    """The call that a rank is about to begin, which the others hear of before anything else.

    `microbatches` is 0 where it refuses its batch, `digest` where batches are not compared.
    """

    training: int  # 1, and 0 in an evaluation
    every: int  # steps from one comparison to the next
    microbatches: int = 0
    digest: int = 0

    def __str__(self) -> str:
        kind = "training" if self.training else "evaluation"
        return f"{kind} of {self.microbatches} micro-batches, check_batches = {self.every}"


def difference_of_calls(program: RankProgram, calls: Sequence[WorkerCall]) -> str:
    """How the calls of the ranks differ, the same text on all of them; empty where they agree."""
    refusing = [rank for rank, call in enumerate(calls) if not call.microbatches]
    if refusing:
        return f"rank {refusing[0]} refused its batch and says why: no rank has taken this one"
    for rank, call in enumerate(calls):
        if call[:3] != calls[0][:3]:
            return f"all ranks must make the same call (rank 0: {calls[0]}; rank {rank}: {call})"
        data = program.grid.coordinate(rank).data
        first = program.grid.rank(0, data)
        if call.digest != calls[first].digest:
            return (
                f"ranks {first} and {rank} were given different batches: give all ranks of a data "
                f"coordinate ({data}) the same"
            )
    return ""


def digest_of_batch(microbatches: Sequence[Mapping[str, torch.Tensor]]) -> int:
    """A number of 60 bits that equal micro-batches have in common, and others do not."""
    text = hashlib.sha256()
    for name, tensor in (entry for batch in microbatches for entry in batch.items()):
        raw = tensor.detach().cpu().contiguous()
        text.update(f"{name} {raw.dtype} {tuple(raw.shape)}".encode())
        text.update((ctypes.c_char * raw.nbytes).from_address(raw.data_ptr()))
    return int(text.hexdigest()[:15], 16)


def difference_of_weights(
    program: RankProgram, tensors: Mapping[str, Sequence[torch.Tensor]], channels: Channels
) -> str:
    """Which ranks have other values than they must, the same text on all; empty where they agree.

    `tensors` are those of this rank under each name: a parameter, and its master if it has one.
    A collective of all ranks.
    """
    if program.data == program.tensor == 1 and not program.tied:
        return ""
    compared = [name for name in tensors if _is_compared(program, name)]
    digests = digests_of([tensors[name] for name in compared], channels.device)
    numbers = dict(zip(compared, digests, strict=True))
    sums = [
        combined({name: numbers.get(name) for name in names}) for names in _sets(program, numbers)
    ]
    ranks = channels.gather_numbers(*sums)
    pairs = ((k, a, b) for k, a, b in _pairs(program) if ranks[a][k] != ranks[b][k])
    k, first, other = next(pairs, (0, 0, 0))
    if first == other:
        return ""
    texts = channels.gather_texts(json.dumps(numbers if program.rank in (first, other) else {}))
    one, two = (json.loads(texts[rank]) for rank in (first, other))
    names = [n for n in _sets(program, one | two)[k] if one.get(n) != two.get(n)]
    return (
        f"ranks {first} and {other} must hold the same weights, and do not ({len(names)} tensors "
        f"differ, the first is {names[0]!r}): seed every rank alike before building the model, or "
        "load the same weights on all of them"
    )


def _sets(program: RankProgram, names: Iterable[str]) -> list[list[str]]:
    """Names of all tensors but experts, of those that ranks have whole, of all, and of each tied
    one alone."""
    ordered = sorted(names)
    whole = [n for n in ordered if _is_whole(program, n)]
    everywhere = [n for n in ordered if n not in program.experts]
    return [everywhere, whole, ordered, *([n] for n in _ties(program))]


def _pairs(program: RankProgram) -> Iterator[tuple[int, int, int]]:
    """The number of a set of names, and two ranks that must have the same values of these."""
    grid = program.grid
    for rank in range(grid.size):
        at = grid.coordinate(rank)
        yield 0, grid.rank(at.pipeline, 0, at.tensor), rank
        yield 1, grid.rank(at.pipeline), rank
        yield 2, grid.rank(at.pipeline, at.data % grid.expert, at.tensor), rank
        for k, ranks in enumerate(_ties(program).values(), start=3):
            if at.pipeline in ranks:
                yield k, grid.rank(ranks[0], 0, at.tensor), rank


def _ties(program: RankProgram) -> dict[str, tuple[int, ...]]:
    """The pipeline coordinates that hold each tied tensor."""
    return {tied.name: tied.ranks for tied in program.tied.values()}


def _is_whole(program: RankProgram, name: str) -> bool:
    """Whether each rank holds the whole of a tensor."""
    return name not in program.pieces


def _is_compared(program: RankProgram, name: str) -> bool:
    """Whether other ranks must have the same values of a tensor."""
    in_group = program.tensor > 1 and _is_whole(program, name)
    return program.data > 1 or in_group or name in _ties(program)


def combined(numbers: Mapping[str, int | None]) -> int:
    """A number of 60 bits for the numbers of several tensors."""
    text = json.dumps([*numbers.items()])
    return int(hashlib.sha256(text.encode()).hexdigest()[:15], 16)


def digests_of(tensors: Sequence[Sequence[torch.Tensor]], device: torch.device) -> list[int]:
    """A number of 64 bits for each group of tensors, by their bytes."""
    if not tensors:
        return []
    factors = _mixed(torch.arange(1, BLOCK + 1, device=device) * _ODD) | 1
    with torch.no_grad():
        groups = [
            torch.stack([_folded(words, factors) for tensor in group for words in _words(tensor)])
            for group in tensors
        ]
        return torch.stack([_folded(numbers, factors) for numbers in groups]).tolist()


def _words(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The bytes of a tensor as integers: eight by eight, which is fastest, then those left over."""
    flat = in_memory(tensor.detach()).reshape(-1)
    raw = real(flat).reshape(-1).view(torch.uint8)
    if raw.storage_offset() % 8:
        raw = raw.clone()
    whole = len(raw) // 8 * 8
    yield raw[:whole].view(torch.int64)
    if whole < len(raw):
        yield raw[whole:].long()


def _folded(words: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """The sum of integers times factors, modulo 2**64, mixed; block by block where they are many.

    As factors are odd, two blocks that differ in one element have different sums.
    """
    if len(words) > BLOCK:
        words = torch.stack([_folded(block, factors) for block in words.split(BLOCK)])
        return _folded(words, factors)
    return _mixed((words * factors[: len(words)]).sum())


def _mixed(numbers: torch.Tensor) -> torch.Tensor:
    """A bijection of integers whose high bits depend on all bits, so that blocks in another order
    have another sum."""
    return (numbers ^ ((numbers >> 29) & (2**35 - 1))) * _ODD
