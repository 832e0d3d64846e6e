"""Buckets: gradients that are summed together over the data ranks, and their places in the lists.

    BACKWARD stage 1 mb 6
    BACKWARD stage 1 mb 7                        the gradients of stage 1 are final
    SEND x.grad mb 7 to 0
    REDUCE_GRADIENTS bucket_0 ranks 1            rank 1 with its data replicas
    REDUCE_GRADIENTS bucket_1 ranks 1
    BACKWARD stage 0 mb 7 ...                    runs while they are summed

A parameter that several stages of a rank read is final after the last of their backwards. The
order inside a stage is that in which a backward makes gradients final: the reverse of the order in
which the forward reads the parameters. A tensor that several ranks hold is summed over all of
their data replicas at once, as `TiedTensor`, and is in no bucket; experts of one data rank alone
need no sum.

Where data ranks keep pieces of gradients (ZeRO 2), a bucket is summed after each backward of its
stage, and the sum is added to the pieces:

    BACKWARD stage 1 mb 6
    REDUCE_GRADIENTS bucket_0 mb 6 ranks 1
    BACKWARD stage 1 mb 7
    REDUCE_GRADIENTS bucket_0 mb 7 ranks 1

A tensor that several ranks hold is then in a bucket of each, and its sum at the end is over pieces.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterator, Sequence
from dataclasses import replace
from operator import itemgetter

from parcompiler.graph import Graph
from parcompiler.instruction import EXPERTS, FINAL, MESSAGES, ROWS, Instruction, Kind
from parcompiler.lower.lowered import Bucket, Spread, StageProgram, TiedTensor
from parcompiler.problem import bucket_size, filled
from parcompiler.schedules.action import NOWHERE

Lines = tuple[Instruction, ...]
ADDS = frozenset((*FINAL, Kind.T, Kind.EMBED_BACKWARD))  # these add to gradients of parameters


def buckets(
    graph: Graph,
    stages: Sequence[StageProgram],
    apart: Container[str],
    lists: Sequence[Lines],
    spread: Spread | None = None,
) -> tuple[Bucket, ...]:
    """The buckets of every rank, in the order in which they become final there; the tensors in
    `apart` are in none."""
    most = bucket_size(graph, len(lists))
    buckets: list[Bucket] = []
    for rank, lines in enumerate(lists):
        final = _final(graph, stages, rank, lines)
        if spread is not None:
            final[NOWHERE] = list(spread.tensors)
        for stage, names in final.items():
            items = [graph.by_name[name] for name in names if name not in apart]
            items = [item for item in items if item.trainable]
            for part in filled(items, most):
                part_names = tuple(item.name for item in part)
                kind = EXPERTS if part[0].experts else ROWS if part[0].looked_up else "bucket_"
                buckets.append(Bucket(f"{kind}{len(buckets)}", part_names, (rank,), stage))
    return tuple(buckets)


def gathered(
    lists: Sequence[Lines],
    buckets: Sequence[Bucket],
    tied: Sequence[TiedTensor],
    kind: Kind = Kind.GATHER_PARAMETERS,
) -> tuple[Lines, ...]:
    """The lists with a gather of each bucket and tied tensor, which data ranks have updated in
    parts, after the optimizer's step; the tensors that the next forward reads first come first."""
    order: list[TiedTensor | Bucket] = [*tied, *reversed(buckets)]
    return tuple(
        (*lines, *(Instruction(kind, value=x.label, ranks=(r,)) for x in order if r in x.ranks))
        for r, lines in enumerate(lists)
    )


def placed(
    lists: Sequence[Lines], buckets: Sequence[Bucket], *, each: bool = False
) -> tuple[Lines, ...]:
    """The lists with the buckets of each stage after its last backward and the messages of that;
    `each`: after the backward of each micro-batch."""
    return tuple(tuple(_placed(rank, lines, buckets, each)) for rank, lines in enumerate(lists))


def _placed(
    rank: int, lines: Lines, buckets: Sequence[Bucket], each: bool
) -> Iterator[Instruction]:
    """The list of one rank with its buckets."""
    behind: dict[int, list[Instruction]] = defaultdict(list)
    ends = _ends(lines, each=each)
    for bucket in buckets:
        if bucket.ranks == (rank,):
            whole = Instruction(Kind.REDUCE_GRADIENTS, value=bucket.label, ranks=bucket.ranks)
            for (stage, i), place in ends.items():
                if stage == bucket.stage:
                    behind[place].append(replace(whole, microbatch=i))
    begin = 0
    for place in sorted(behind):
        after = range(place + 1, len(lines))
        end = next((k for k in after if lines[k].kind not in MESSAGES), len(lines))
        yield from lines[begin:end]
        yield from behind[place]
        begin = end
    yield from lines[begin:]


def _ends(lines: Lines, *, each: bool = False) -> dict[tuple[int, int | None], int]:
    """The place in a list where the gradients of each stage are final, the earliest first, or
    complete for a micro-batch if `each` is wanted. The stage is NOWHERE for the vocabulary passes
    of all ranks."""
    places: dict[tuple[int, int | None], int] = {}
    for place, line in enumerate(lines):
        if line.kind in ADDS:
            home = NOWHERE if line.stage is None else line.stage
            places[home, line.microbatch if each else None] = place
    return dict(sorted(places.items(), key=itemgetter(1)))


def _final(
    graph: Graph, stages: Sequence[StageProgram], rank: int, lines: Lines
) -> dict[int, list[str]]:
    """By stage of a rank, the parameters that are final after its last backward, in order."""
    stage_of = {stage.index: stage for stage in stages if stage.rank == rank}
    homes: dict[str, int] = {}
    names_of: dict[int, list[str]] = defaultdict(list)
    order = [j for j, _ in _ends(lines) if j != NOWHERE]
    for j in order:
        for name in _read(graph, stage_of[j]):
            homes[name] = j
    for j in order:
        names_of[j] = [name for name in reversed(_read(graph, stage_of[j])) if homes[name] == j]
    return names_of


def _read(graph: Graph, stage: StageProgram) -> list[str]:
    """The trained parameters that a stage reads, by their first use."""
    operands = (
        graph.by_node.get(operand.name)
        for call in stage.calls
        for node in call.block.nodes
        for operand in node.all_input_nodes
    )
    return list(dict.fromkeys(item.name for item in operands if item and item.trainable))
