"""The rows of its parameters that each data rank updates: ZeRO's first level.

    bucket    ┌ w rows ┐┌ b ┐        of a rank of the pipeline and of the tensor axis
    data 0     w0        b0          [1] gradients are summed over the data ranks, and each gets
    data 1       w1        b1            those of its rows: a reduce-scatter
    data 2         w2        b2      [2] it updates these rows, with optimizer states and masters
                                         of them alone
              w0 w1 w2  b0 b1 b2     [3] and all gather what the others have made of theirs

Rajbhandari et al. 2020, arXiv 1910.02054, section 5.1: 4 + 12/d bytes a parameter in mixed
precision with Adam instead of 16, and as many bytes on the links as an all-reduce. Rows are those
of dimension 0, dealt as `pieces.piece` does. An optimizer that is not known to work element by
element gets whole parameters, balanced over the ranks by their size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from parcompiler.errors import InputError
from parcompiler.instruction import Instruction, Kind
from parcompiler.pieces import Span, piece
from parcompiler.runtime.channels import Channels
from parcompiler.runtime.program import RankProgram

ELEMENTWISE = frozenset(
    "SGD Adam AdamW Adagrad Adadelta Adamax ASGD NAdam RAdam RMSprop Rprop".split()
)  # of torch.optim: what they make of an element depends on that element alone

Tensors = Mapping[str, torch.Tensor]


class _Place(NamedTuple):
    """Where the rows that a data rank updates of a parameter stand in its segment of a bucket."""

    name: str
    data: int
    begin: int
    end: int


class DataParts:
    """What each data rank updates of the trained parameters of a rank, by their names.

    `parts` are views of the rows of this data rank; a parameter of which it updates none has no
    part. `reduced` are the names of those that have gradients in this step, `whole` says whether
    parameters are shared out undivided.
    """

    def __init__(self, program: RankProgram, tensors: Tensors, channels: Channels) -> None:
        at = program.coordinate
        self._ranks = program.grid.replicas((at.pipeline,), at.tensor)
        self._count, self._index = program.data, at.data
        self._channels = channels
        tied = {label: (item.name,) for label, item in program.tied.items()}
        buckets = {**program.buckets, **tied}
        lines = [x for x in program.instructions if x.kind is Kind.GATHER_PARAMETERS]
        self._buckets = {line: buckets[line.value or ""] for line in lines}
        self.parameters = {
            name: parameter
            for names in self._buckets.values()
            for name in names
            if isinstance(parameter := tensors[name], nn.Parameter)
        }
        self.whole = False
        self.reduced: set[str] = set()
        self._share_out()

    def suits(self, kind: Callable[..., torch.optim.Optimizer]) -> bool:
        """Whether an optimizer can take the parameters as they are shared out."""
        while isinstance(kind, functools.partial):
            kind = kind.func
        name = getattr(kind, "__name__", "")
        return self.whole != (name in ELEMENTWISE and getattr(torch.optim, name) is kind)

    def turn(self) -> None:
        """Share the parameters out whole, or in rows again.

        Raises InputError where gradients of the last step have been shared out otherwise.
        """
        if any(part.grad is not None for part in self.parts.values()):
            message = (
                "the gradients of the last step are shared out among the data ranks otherwise "
                "than this optimizer needs them: call worker.set_optimizer before worker.step"
            )
            raise InputError(message)
        self.whole = not self.whole
        self._share_out()

    def rows(self, name: str, tensor: torch.Tensor, data: int | None = None) -> torch.Tensor:
        """The rows of a data rank (this one) of a tensor like the parameter `name`: a view."""
        span = self._spans[name][self._index if data is None else data]
        return _with_rows(tensor).narrow(0, span.start, span.size)

    def span(self, name: str) -> Span:
        """The rows of a parameter that this data rank updates; it may be none."""
        return self._spans[name][self._index]

    def is_first(self, name: str) -> bool:
        """Whether no data rank before this one updates rows of a parameter."""
        return not any(span.size for span in self._spans[name][: self._index])

    def scatter(self, names: Sequence[str]) -> Any:
        """Start summing the gradients of a bucket over the data ranks; what to wait for.

        Parts have the sums as gradients when that has ended, and parameters have none any more.
        """
        if self.whole:
            work = self._channels.sum(flat([self.parameters[n] for n in names]), self._ranks)
            self.take_gradients(names)
            return work
        segments, places = self._bucket(names, {n: self.parameters[n].grad for n in names})
        targets, gradients = [], []
        for place in places:
            gradient = self.parameters[place.name].grad
            if gradient is None:
                segments[place.data, place.begin : place.end] = 0
            elif gradient.data_ptr() != segments.data_ptr():
                gradients.append(self.rows(place.name, gradient, place.data))
                targets.append(_view(segments, place, gradients[-1]))
        if targets:
            torch._foreach_copy_(targets, gradients)
        own = segments.new_empty(1, segments.shape[1])
        work = self._channels.scatter(segments, own, self._ranks)
        for place in places:
            if place.data == self._index and self.parameters[place.name].grad is not None:
                part = self.parts[place.name]
                part.grad = _view(own, place._replace(data=0), part)
        for name in names:
            if self.parameters[name].grad is not None:
                self.reduced.add(name)
            self.parameters[name].grad = None
        return work

    def take_gradients(self, names: Iterable[str]) -> None:
        """Give parts their rows of gradients that are summed as a whole, and parameters none."""
        for name in names:
            parameter, part = self.parameters[name], self.parts.get(name)
            if parameter.grad is not None:
                self.reduced.add(name)
                if part is not None:
                    part.grad = self.rows(name, parameter.grad)
            parameter.grad = None

    def gather(self) -> Iterator[Instruction]:
        """Get the rows that the other data ranks have updated, line by line: yields each, and then
        does it. A collective of the data ranks."""
        for line, names in self._buckets.items():
            yield line
            self._exchange(names, self.parts, self.parameters)

    def joined(self, rows: Tensors, like: Tensors) -> dict[str, torch.Tensor]:
        """Whole tensors of the form of those in `like` from the `rows` that each data rank has of
        them. A collective of the data ranks."""
        found = {name: torch.empty_like(tensor) for name, tensor in like.items()}
        for bucket in self._buckets.values():
            names = [name for name in bucket if name in like]
            if names:
                self._exchange(names, rows, found)
        return found

    @torch.no_grad()
    def _exchange(self, names: Sequence[str], rows: Tensors, into: Tensors) -> None:
        """Fill tensors of one dtype with the rows of all data ranks."""
        if self.whole:
            for name in names:
                home = next(k for k, span in enumerate(self._spans[name]) if span.size)
                buffer = torch.empty_like(into[name], memory_format=torch.contiguous_format)
                if home == self._index:
                    buffer.copy_(rows[name].view_as(buffer))
                self._channels.give(buffer, self._ranks, home)
                into[name].copy_(buffer)
            return
        segments, places = self._bucket(names, into)
        own = segments.new_empty(1, segments.shape[1])
        mine = [place for place in places if place.data == self._index]
        views = [_view(own, place._replace(data=0), rows[place.name]) for place in mine]
        if views:
            torch._foreach_copy_(views, [rows[place.name] for place in mine])
        self._channels.gather(segments, own, self._ranks)
        if segments.data_ptr() != into[names[0]].data_ptr():
            here = into is self.parameters  # its own rows are there
            others = [place for place in places if not here or place.data != self._index]
            targets = [self.rows(place.name, into[place.name], place.data) for place in others]
            if others:
                torch._foreach_copy_(
                    targets,
                    [_view(segments, *pair) for pair in zip(others, targets, strict=True)],
                )

    def _share_out(self) -> None:
        """Deal the rows of all parameters, and make the parts of this rank."""
        self._spans: dict[str, list[Span]] = {}
        loads = [0] * self._count
        for name, parameter in sorted(self.parameters.items(), key=lambda item: -item[1].numel()):
            size = _with_rows(parameter).shape[0]
            if self.whole:
                home = loads.index(min(loads))
                loads[home] += parameter.numel()
                spans = [Span(0, size if k == home else 0) for k in range(self._count)]
            else:
                spans = [piece(size, self._count, k) for k in range(self._count)]
            self._spans[name] = spans
        self.parts = {
            name: nn.Parameter(self.rows(name, parameter.detach()), parameter.requires_grad)
            for name, parameter in self.parameters.items()
            if self._spans[name][self._index].size
        }

    def _bucket(
        self, names: Sequence[str], tensors: Mapping[str, torch.Tensor | None]
    ) -> tuple[torch.Tensor, list[_Place]]:
        """A bucket with a segment for each data rank, all as long, and what stands where in it.

        It is the memory of a tensor that is alone in it, where that lies there as it would.
        """
        places, longest = [], 0
        for k in range(self._count):
            begin = 0
            for name in names:
                end = begin + self.rows(name, self.parameters[name], k).numel()
                if end > begin:
                    places.append(_Place(name, k, begin, end))
                begin = end
            longest = max(longest, begin)
        known = [tensor.detach() for name in names if (tensor := tensors[name]) is not None]
        if len(names) == len(known) == 1 and known[0].numel() == self._count * longest:
            if known[0].is_contiguous():
                return known[0].view(self._count, longest), places
        like = (*known, self.parameters[names[0]])[0]
        return like.new_empty(self._count, longest), places


def flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The gradients of some tensors as one tensor, of which they are views from now on.

    A parameter without a gradient has none on any data rank, and so has none afterwards.
    """
    bucket = tensors[0].new_empty(sum(tensor.numel() for tensor in tensors))
    views = [
        piece.view_as(tensor)
        for piece, tensor in zip(bucket.split([t.numel() for t in tensors]), tensors, strict=True)
    ]
    targets, gradients = [], []
    for tensor, view in zip(tensors, views, strict=True):
        if tensor.grad is None:
            view.zero_()
        else:
            targets.append(view)
            gradients.append(tensor.grad)
            tensor.grad = view
    if targets:
        torch._foreach_copy_(targets, gradients)
    return bucket


def _with_rows(tensor: torch.Tensor) -> torch.Tensor:
    """A scalar as a row."""
    return tensor.reshape(1) if tensor.dim() == 0 else tensor


def _view(segments: torch.Tensor, place: _Place, like: torch.Tensor) -> torch.Tensor:
    """What stands at a place, in the form of those rows."""
    return segments[place.data, place.begin : place.end].view(like.shape)
