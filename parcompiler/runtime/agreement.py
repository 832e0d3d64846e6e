"""Checks that all ranks agree, so that none continues alone or computes something else.

    at the start           the program, and the scripts and weights of the exported folder
    before a call          training or evaluation, the number of micro-batches, digests of batches
                           and of the optimizer's options
    before the first call  the order of what compiled layers exchange
    after loading weights  the tensors of which several ranks have copies:
        data ranks             at the same pipeline and tensor coordinate: all tensors
        tensor ranks           of one group: the tensors of which each has the whole
        pipeline ranks         tied tensors

Ranks compare one digest for each of these, and exchange the digests of single tensors only where it
differs. Weights are not compared again later: statistics of batch norms differ between data ranks,
as their batches do.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

import torch

from parcompiler.errors import LaunchError
from parcompiler.runtime.axis import in_memory, raw
from parcompiler.runtime.channels import Channels
from parcompiler.runtime.files import Fingerprint
from parcompiler.runtime.program import RankProgram


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
    """The call that a rank is about to begin; ranks exchange it before anything else.

    `microbatches` is 0 if the rank refuses its batch; `digest`, of the batch, and `options`, of
    those of the optimizer, are 0 if they are not compared.
    """

    training: int  # 1, and 0 in an evaluation
    every: int  # steps from one comparison to the next
    microbatches: int = 0
    digest: int = 0
    options: int = 0

    def __str__(self) -> str:
        kind = "training" if self.training else "evaluation"
        return f"{kind} of {self.microbatches} micro-batches, check_batches = {self.every}"


def difference_of_calls(program: RankProgram, calls: Sequence[WorkerCall]) -> str:
    """How the calls of the ranks differ, the same text on all of them; empty where they agree."""
    refusing = [rank for rank, call in enumerate(calls) if not call.microbatches]
    if refusing:
        return (
            f"rank {refusing[0]} refused its batch (its own error says why), so no rank has used "
            "this one"
        )
    for rank, call in enumerate(calls):
        if call[:3] != calls[0][:3]:
            return f"all ranks must make the same call (rank 0: {calls[0]}; rank {rank}: {call})"
    return difference_of_batches(program, [call.digest for call in calls])


def difference_of_batches(program: RankProgram, digests: Sequence[int]) -> str:
    """Which ranks that share a batch were given different ones; empty if none."""
    for rank, digest in enumerate(digests):
        data = program.grid.batch_of(program.grid.coordinate(rank).data)
        first = program.grid.leaders[data]
        if digest != digests[first]:
            return (
                f"ranks {first} and {rank} were given different batches: give all ranks of a data "
                f"coordinate ({data}) the same"
            )
    return ""


def difference_of_options(
    program: RankProgram,
    digests: Sequence[int],
    options: Mapping[str, str],
    channels: Channels,
) -> str:
    """Which ranks would update pieces or copies of the same parameters in different ways, the same
    text on all ranks; empty where none would. `digests` are those of the `options` of each rank. A
    collective of all ranks where they differ."""
    firsts = [program.grid.rank(program.grid.coordinate(r).pipeline) for r in range(len(digests))]
    other = next((r for r, first in enumerate(firsts) if digests[r] != digests[first]), None)
    if other is None:
        return ""
    first = firsts[other]
    told = channels.gather_values(dict(options) if program.rank in (first, other) else {})
    one, two = told[first], told[other]
    name = next((n for n in {**one, **two} if one.get(n) != two.get(n)), "")
    return (
        f"ranks {first} and {other} would update the same parameters differently ({name} of the "
        f"optimizer is {one.get(name)} on rank {first}, {two.get(name)} on rank {other}): change "
        "it by what all ranks have, as the step, or the loss that train_step returns"
    )


def digest_of_batch(microbatches: Sequence[Mapping[str, torch.Tensor]]) -> int:
    """A 60-bit digest of micro-batches: names, dtypes, shapes and bytes."""
    named = (entry for batch in microbatches for entry in batch.items())
    return combined((f"{n} {t.dtype} {tuple(t.shape)}", digest_of([t])) for n, t in named)


def check_exchanges(program: RankProgram, calls: Sequence[str], channels: Channels) -> None:
    """Raise LaunchError on every rank unless the ranks at each pipeline coordinate, which run the
    same layers, make the same collective `calls` in the same order; else they would deadlock. A
    collective of all ranks."""
    grid = program.grid
    ranks = channels.gather_numbers(combined((call, None) for call in calls))
    firsts = [grid.rank(grid.coordinate(rank).pipeline) for rank in range(grid.size)]
    others = [rank for rank, first in enumerate(firsts) if ranks[rank] != ranks[first]]
    if not others:
        return
    pair = firsts[others[0]], others[0]
    told = channels.gather_values([*calls] if program.rank in pair else [])
    lists = zip_longest(*(told[rank] for rank in pair), fillvalue="none")
    one, other = next((a, b) for a, b in lists if a != b)
    message = (
        f"ranks {pair[0]} and {pair[1]} would exchange in different orders within compiled layers "
        f"(rank {pair[0]}: {one}; rank {pair[1]}: {other}): run without compiled=True"
    )
    raise LaunchError(message)


def difference_of_weights(
    program: RankProgram, tensors: Mapping[str, Sequence[torch.Tensor]], channels: Channels
) -> str:
    """Which ranks' copies of tensors differ, the same text on all ranks; empty where they agree.

    `tensors` has this rank's tensors by name: a parameter, and its master if it has one. A
    collective of all ranks.
    """
    if program.data == program.tensor == 1 and not program.tied:
        return ""
    numbers = {
        name: digest_of(copies)
        for name, copies in tensors.items()
        if program.data > 1
        or (program.tensor > 1 and name not in program.pieces)
        or name in program.ties
    }
    sums = [
        combined((name, numbers.get(name)) for name in names) for names in _sets(program, numbers)
    ]
    ranks = channels.gather_numbers(*sums)
    pairs = ((k, a, b) for k, a, b in _pairs(program) if ranks[a][k] != ranks[b][k])
    k, first, other = next(pairs, (0, 0, 0))
    if first == other:
        return ""
    told = channels.gather_values(numbers if program.rank in (first, other) else {})
    one, two = told[first], told[other]
    names = [n for n in _sets(program, one | two)[k] if one.get(n) != two.get(n)]
    return (
        f"ranks {first} and {other} must hold the same weights, and do not ({len(names)} tensors "
        f"differ, the first is {names[0]!r}): seed every rank alike before building the model, or "
        "load the same weights on all of them"
    )


def _sets(program: RankProgram, names: Iterable[str]) -> list[list[str]]:
    """The sets of names that `_pairs` numbers: all tensors but experts, those that every rank has
    whole, all tensors, and each tied one by itself."""
    ordered = sorted(names)
    whole = [n for n in ordered if n not in program.pieces]
    everywhere = [n for n in ordered if n not in program.experts]
    return [everywhere, whole, ordered, *([n] for n in program.ties)]


def _pairs(program: RankProgram) -> Iterator[tuple[int, int, int]]:
    """Index of a set of `_sets`, and two ranks whose values of its tensors must be equal."""
    grid = program.grid
    for rank in range(grid.size):
        at = grid.coordinate(rank)
        yield 0, grid.rank(at.pipeline, 0, at.tensor), rank
        yield 1, grid.rank(at.pipeline), rank
        yield 2, grid.rank(at.pipeline, at.data % grid.expert, at.tensor), rank
        for k, ranks in enumerate(program.ties.values(), start=3):
            if at.pipeline in ranks:
                yield k, grid.rank(ranks[0], 0, at.tensor), rank


def combined(numbers: Iterable[tuple[str, int | str | None]]) -> int:
    """A 60-bit digest of several values by name, or of digests of tensors."""
    text = json.dumps([*numbers])
    return int(hashlib.sha256(text.encode()).hexdigest()[:15], 16)


def digest_of(tensors: Iterable[torch.Tensor]) -> int:
    """A 60-bit digest of the bytes of some tensors, whatever their device and strides."""
    digest = hashlib.sha256()
    for tensor in tensors:
        plain = in_memory(tensor.detach().cpu())
        digest.update(raw(plain))
    return int(digest.hexdigest()[:15], 16)
