"""Which boxes of the model's tensors a rank holds, and which of them it writes.

    whole      every data and tensor rank of its pipeline coordinates holds it
    in pieces  every data rank of the pipeline and tensor coordinate holds the piece
    in rows    every data rank at the place of the plane holds the rows

One of several replicas writes: large tensors are cut along their first dimension, and the parts are
dealt out so that all ranks write about equally many bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from parcompiler import pieces
from parcompiler.pieces import Span, piece
from parcompiler.runtime.boxes import Box
from parcompiler.runtime.program import RankProgram
from parcompiler.runtime.vocabulary import VocabularyRows

SMALL = 2**16  # bytes; smaller tensors are not cut


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a whole tensor, and the memory of this rank that holds it."""

    box: Box
    tensor: torch.Tensor


class RankLayout:
    """Where the pieces of one rank lie in the tensors of the model."""

    def __init__(self, program: RankProgram) -> None:
        self._program = program
        self._rows = VocabularyRows(program)

    def is_divided(self, name: str) -> bool:
        """Whether a rank holds only a part of a tensor of the model."""
        return name in self._program.rows or self._is_sharded(name) or self._is_of_experts(name)

    def shape(self, name: str, held: torch.Tensor) -> tuple[int, ...]:
        """The whole shape of a tensor of which this rank holds `held`."""
        if name in self._program.rows:
            sizes = list(held.shape)
            sizes[self._rows.place(name, held)[0]] = self._program.rows[name]
            return tuple(sizes)
        shape = tuple(held.shape)
        if self._is_sharded(name):
            shape = self._program.shards[name].shape(shape)
        return (self._program.experts[name], *shape[1:]) if self._is_of_experts(name) else shape

    def parts(
        self, name: str, like: torch.Tensor, held: torch.Tensor, rows: Span | None = None
    ) -> list[Part]:
        """The boxes of a tensor that this rank holds in the memory `held`, without padding.

        `like` has the shape of this rank's tensor; `held` may be just the `rows` of its first
        dimension that this data rank has (a scalar has one).
        """
        if rows is None or not like.dim():
            held, around = held.view(like.shape), Box.whole(like.shape)
        else:
            around = Box.whole(like.shape).narrowed(0, rows.start, rows.size)
        parts = []
        for box, local in self.boxes(name, like):
            common = local.overlap(around)
            if common.count or not box.count:
                place = common.within(local)
                offsets = (a + b for a, b in zip(box.offsets, place.offsets, strict=True))
                part = common.within(around).of(held)
                parts.append(Part(Box(tuple(offsets), common.sizes), part))
        return parts

    def boxes(self, name: str, like: torch.Tensor) -> list[tuple[Box, Box]]:
        """The boxes of the whole tensor that this rank holds, and where they lie in its own
        tensor."""
        boxes = self._boxes_of_tensor_rank(name, like)
        if not self._is_of_experts(name):
            return boxes
        first = self._program.own_experts(name).start
        return [
            (Box((first + box.offsets[0], *box.offsets[1:]), box.sizes), local)
            for box, local in boxes
        ]

    def _boxes_of_tensor_rank(self, name: str, like: torch.Tensor) -> list[tuple[Box, Box]]:
        """The same boxes if this rank held all experts."""
        whole = Box.whole(like.shape)
        if name in self._program.rows:
            dim, span = self._rows.place(name, like)
            spans: Sequence[Span] = [span]
        elif self._is_sharded(name):
            shard, tensor = self._program.shards[name], self._program.coordinate.tensor
            dim, spans = shard.dim, shard.spans(self._program.tensor, tensor)
        else:
            return [(whole, whole)]
        boxes, start = [], 0
        for span in spans:
            if span.size:
                local = whole.narrowed(dim, start, span.size)
                offsets = (*whole.offsets[:dim], span.start, *whole.offsets[dim + 1 :])
                boxes.append((Box(offsets, local.sizes), local))
            start += span.size
        return boxes

    def _is_of_experts(self, name: str) -> bool:
        return name in self._program.experts and self._program.expert > 1

    def written(
        self,
        held: Mapping[str, Sequence[Part]],
        first: Mapping[str, int],
        untrained: Collection[str],
        alone: Collection[str],
    ) -> dict[str, list[Part]]:
        """The parts that this rank writes, by key, of all that it holds. Each part is written by
        exactly one rank, as all holders compute the same deal. `first` is the first pipeline
        coordinate that holds a tensor, by its name. Tensors that are `untrained` may differ between
        data ranks: those of data rank 0 are the model's. `alone` are the keys that no other data
        rank holds."""
        at, program = self._program.coordinate, self._program
        parts_of: dict[str, list[Part]] = {}
        groups: dict[tuple[bool, bool, int], dict[str, Sequence[Part]]] = {}
        for key, parts in held.items():
            name = base(key)
            if name in program.rows or first[name] == at.pipeline:
                # The number of data ranks that share it; none where each has its own.
                data = 0 if key in alone else 1 if name in untrained else program.data
                split = name in program.rows or self._is_sharded(name)
                groups.setdefault((split, self._is_of_experts(name), data), {})[key] = parts
        for (split, apart, data), group in groups.items():
            tensor, index = (1, 0) if split else (program.tensor, at.tensor)
            share = program.expert if apart else 1  # neighbours with other experts
            place, count = at.data // share, -(-data // share)
            if data == 0 or place < count:
                ranks = dealt(group, max(1, count) * tensor)
                for key, part in ranks[(place if data else 0) * tensor + index]:
                    parts_of.setdefault(key, []).append(part)
        return parts_of

    def _is_sharded(self, name: str) -> bool:
        return name in self._program.shards and self._program.tensor > 1


def base(key: str) -> str:
    """The name of the parameter or buffer that a key belongs to.

    >>> base("optimizer exp_avg/h.0.weight"), base("model/h.0.weight")
    ('h.0.weight', 'h.0.weight')
    """
    return key.partition("/")[2]


def dealt(sizes: Mapping[str, Sequence[Part]], ranks: int) -> list[list[tuple[str, Part]]]:
    """Parts dealt out over ranks that all hold them, as `pieces.dealt` does. Parts above a fair
    share are cut along their first dimension."""
    whole = [(name, part) for name, parts in sizes.items() for part in parts]
    fair = max(SMALL, sum(_bytes(part) for _, part in whole) // ranks)
    cut = [(name, part) for name, one in whole for part in _cut(one, fair)]
    cut.sort(key=lambda item: (-_bytes(item[1]), item[0], item[1].box.offsets))
    dealt_to: list[list[tuple[str, Part]]] = [[] for _ in range(ranks)]
    homes = pieces.dealt({str(k): _bytes(part) for k, (_, part) in enumerate(cut)}, ranks)
    for k, rank in homes.items():
        dealt_to[rank].append(cut[int(k)])
    return dealt_to


def _cut(part: Part, fair: int) -> Iterator[Part]:
    """A part, or rows of it that are a fair share at most."""
    number = -(-_bytes(part) // fair)
    if number <= 1 or not part.box.sizes:
        yield part
        return
    rows = part.box.sizes[0]
    number = min(number, rows)
    for k in range(number):
        span = piece(rows, number, k)
        yield Part(
            part.box.narrowed(0, span.start, span.size),
            part.tensor.narrow(0, span.start, span.size),
        )


def _bytes(part: Part) -> int:
    return part.box.count * part.tensor.element_size()
