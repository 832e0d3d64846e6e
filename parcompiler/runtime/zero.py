"""The parts of a rank's parameters on each data rank: the levels of ZeRO.

    bucket    ┌ w rows ┐┌ b ┐        at one pipeline and tensor coordinate
    data 0     w0        b0          [1] gradients are summed over the data ranks, and each gets
    data 1       w1        b1            those of its rows: a reduce-scatter
    data 2         w2        b2      [2] it updates these rows, with optimizer states and masters
                                         of them alone
              w0 w1 w2  b0 b1 b2     [3] and all gather the updated rows of the others,
                                         beside the next forward: each layer waits for its own

Rajbhandari et al. 2020, arXiv 1910.02054, section 5.1: 6 + 12/d bytes a parameter in mixed
precision with Adam instead of 18, and the bytes on the links are those of an all-reduce. Rows are
of dimension 0, dealt as `pieces.piece` does. An optimizer that is not known to work element by
element gets whole parameters, balanced over the ranks by their size.

The second level does [1] after every micro-batch and adds to the rows, so that only a few buckets
of whole gradients are in memory. The third keeps only rows of the parameters of stages, and so has
no [3]: around each use of a stage

    UNSHARD     its parameters get memory and are gathered from all data ranks
    RESHARD     that memory is freed

Experts that expert ranks share out are dealt to the data ranks that have the same ones; a data rank
that alone has some holds them whole, as without ZeRO.

Autograd refers to the memory of parameters by their storage, which stays one object throughout:
views that a forward saved are valid again when its backward has unsharded them (as in FSDP2).
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import NamedTuple

import torch
from torch import nn

from parcompiler.errors import InputError
from parcompiler.instruction import Instruction, Kind
from parcompiler.pieces import Span, dealt, piece
from parcompiler.runtime.axis import in_memory
from parcompiler.runtime.channels import Channels
from parcompiler.runtime.collective_queue import Arrival
from parcompiler.runtime.mixed_precision import gradient_of
from parcompiler.runtime.program import RankProgram

ELEMENTWISE = frozenset(
    "SGD Adam AdamW Adagrad Adadelta Adamax ASGD NAdam RAdam RMSprop Rprop".split()
)  # of torch.optim: whose update of an element depends on that element alone

Tensors = Mapping[str, torch.Tensor]


def is_elementwise(kind: Callable[..., torch.optim.Optimizer]) -> bool:
    """Whether an optimizer is known to work element by element.

    >>> is_elementwise(functools.partial(torch.optim.AdamW, lr=1.0))
    True
    >>> is_elementwise(torch.optim.Adafactor)
    False
    """
    while isinstance(kind, functools.partial):
        kind = kind.func
    name = getattr(kind, "__name__", "")
    return name in ELEMENTWISE and getattr(torch.optim, name) is kind


class _Sharers(NamedTuple):
    """The data ranks that share out a parameter, and the place of this one among them."""

    ranks: tuple[int, ...]
    place: int


class _Place(NamedTuple):
    """Where a data rank's rows of a parameter lie in its segment of a bucket."""

    name: str
    data: int
    begin: int
    end: int


class DataParts:
    """The parts of a rank's parameters on each data rank, by name.

    `parts` are the rows that this data rank updates: views of the parameters, or all that it holds
    of those `in_pieces`. A parameter of which it has no rows has no part, unless no rank has any.
    `whole` says whether parameters are shared out undivided.
    """

    def __init__(
        self,
        program: RankProgram,
        tensors: Tensors,
        channels: Channels,
        held: Mapping[int, Sequence[str]],
    ) -> None:
        """`held` are the names of the tensors of each stage."""
        at, self.level = program.coordinate, program.sharing
        self._narrow = program.narrow
        self._served = program.updates.way == "parameter-server"
        self._channels, self._experts = channels, program.experts
        grid, expert = program.grid, at.data % program.expert
        self._every = _Sharers(grid.replicas((at.pipeline,), at.tensor), at.data)
        of_experts = grid.replicas((at.pipeline,), at.tensor, expert)
        self._alike = _Sharers(of_experts, at.data // program.expert)  # those with equal experts
        buckets = program.summed if self.level == 1 else program.buckets
        lines = [x for x in program.instructions if x.kind is Kind.GATHER_PARAMETERS]
        self._behind = {line: buckets[line.value or ""] for line in lines}
        shared = dict.fromkeys(name for names in buckets.values() for name in names)
        self._stages: dict[int, list[str]] = {}
        if self.level == 3:
            for j, names in held.items():
                of_stage = [
                    name
                    for name in dict.fromkeys(names)
                    if isinstance(tensors[name], nn.Parameter)
                    and len(self._sharers(name).ranks) > 1
                ]
                self._stages[j] = of_stage
                shared |= dict.fromkeys(of_stage)
        self.parameters = {
            name: parameter
            for name in shared
            if isinstance(parameter := tensors[name], nn.Parameter)
        }
        bucketed = {name for names in buckets.values() for name in names}
        self._buckets = [*buckets.values(), *((n,) for n in shared if n not in bucketed)]
        self.in_pieces = frozenset(name for of_stage in self._stages.values() for name in of_stage)
        self._nbytes = {n: self.parameters[n].untyped_storage().nbytes() for n in self.in_pieces}
        self._users: Counter[str] = Counter()  # stages that need a parameter whole now
        self._arriving: list[tuple[set[str], Arrival]] = []
        self._ties = {
            name: tuple(grid.rank(p, at.data, at.tensor) for p in ranks)
            for name, ranks in program.ties.items()
        }
        self.whole = self._served
        self._share_out()
        for name in self.in_pieces:
            self._free(name)

    def _sharers(self, name: str) -> _Sharers:
        """The sharers of a parameter, the same for all of a bucket."""
        return self._alike if name in self._experts else self._every

    def suits(self, *, elementwise: bool) -> bool:
        """Whether the parameters are shared out as an optimizer needs them: in rows if it works
        element by element, whole if not."""
        return self._served or self.whole != elementwise

    def turn(self) -> None:
        """Switch between sharing parameters out whole and in rows.

        Raises InputError if there are gradients of the last step, which were shared out the other
        way.
        """
        if any(part.grad is not None for part in self.parts.values()):
            message = (
                "the last step divided its gradients among the data ranks in another way than "
                "this optimizer needs: call worker.set_optimizer before worker.step"
            )
            raise InputError(message)
        self.arrive()
        dtypes = {name: self.parameters[name].dtype for name in self.in_pieces}
        wholes = self.joined(self.parts, dtypes)
        self.whole = not self.whole
        self._share_out()
        for name in wholes.keys() & self.parts.keys():
            self.parts[name].data.copy_(self.rows(name, wholes[name]))

    def rows(self, name: str, tensor: torch.Tensor, data: int | None = None) -> torch.Tensor:
        """The rows of a data rank (this one) of a tensor like the parameter `name`: a view."""
        span = self._spans[name][self._sharers(name).place if data is None else data]
        tensor = tensor if tensor.dim() else tensor.reshape(1)  # a scalar is a row
        return tensor.narrow(0, span.start, span.size)

    def span(self, name: str) -> Span:
        """The rows of a parameter that this data rank updates; it may be none."""
        return self._spans[name][self._sharers(name).place]

    def is_first(self, name: str) -> bool:
        """Whether no data rank before this one updates rows of a parameter."""
        return not any(span.size for span in self._spans[name][: self._sharers(name).place])

    def unshard(self, j: int) -> None:
        """Start gathering the parameters of a stage. A collective of the data ranks."""
        missing = [name for name in self._stages.get(j, ()) if not self._users[name]]
        self._users.update(self._stages.get(j, ()))
        alike: dict[object, list[str]] = {}
        for name in missing:
            key = self.parameters[name].dtype, self._sharers(name)
            alike.setdefault(key, []).append(name)
        for names in alike.values():
            arrival = self._exchange(names, self.parts, self.parameters)
            self._arriving.append(({*names}, arrival))

    def ready(self, needed: Set[str]) -> Arrival | None:
        """The arrival after which these parameters are whole; None if they are."""
        behind = [k for k, (names, _) in enumerate(self._arriving) if names & needed]
        if not behind:
            return None
        first, self._arriving = self._arriving[: behind[-1] + 1], self._arriving[behind[-1] + 1 :]
        return Arrival([arrival for _, arrival in first])

    def reshard(self, j: int) -> None:
        """Free the parameters of a stage, except for the rows of this data rank."""
        for name in self._stages.get(j, ()):
            self._users[name] -= 1
            if not self._users[name]:
                self._free(name)

    def arrive(self) -> None:
        """Wait for all gathers that are running."""
        for _, arrival in self._arriving:
            arrival.wait()
        self._arriving.clear()

    def end(self) -> None:
        """Free parameters that are still whole after the last instruction of a list."""
        self.arrive()
        for name in +self._users:
            self._free(name)
        self._users.clear()

    def sum_copies(self, name: str) -> Arrival:
        """Start summing the gradients of this data rank's rows of a tied tensor over the ranks that
        hold it at this data coordinate."""
        part = self.parts.get(name)
        if part is None:
            return Arrival(())
        return Arrival([self._channels.sum(contiguous_gradient(part), self._ties[name])])

    def scatter(self, names: Sequence[str]) -> Arrival:
        """Start summing the gradients of a bucket over the data ranks, and take them from the
        parameters; `wait` adds the sums to the gradients of parts."""
        having = [name for name in names if self.parameters[name].grad is not None]
        ranks, index = self._sharers(names[0])
        dtype = self.parameters[names[0]].dtype
        dtype = torch.float32 if dtype == self._narrow else dtype
        if self.whole:
            add_up = (
                self._channels.reduce
                if self._served
                else functools.partial(self._channels.sum, in_order=self.level == 3)
            )
            bucket, views = flat([self.parameters[n] for n in names], dtype)
            mine = {n: view for n, view in zip(names, views, strict=True) if n in having}
            for name in names:
                self.parameters[name].grad = None
            return Arrival([add_up(bucket, ranks)], lambda: self._add(mine))
        gradients = [p.grad for n in names if (p := self.parameters[n]).grad is not None]
        alone = [g for g in gradients if len(names) == 1 and g.dtype == dtype]
        segments, places = self._bucket(names, dtype, alone)
        targets, rows = [], []
        for place in places:
            gradient = self.parameters[place.name].grad
            if gradient is None:
                segments[place.data, place.begin : place.end] = 0
            elif gradient.data_ptr() != segments.data_ptr():
                rows.append(self.rows(place.name, gradient, place.data))
                targets.append(_view(segments, place, rows[-1]))
        if targets:
            torch._foreach_copy_(targets, rows)
        segment = segments.new_empty(1, segments.shape[1])
        work = self._channels.scatter(segments, segment, ranks)
        sums = {
            place.name: _view(segment, place._replace(data=0), self.parts[place.name])
            for place in places
            if place.data == index and place.name in {*having}
        }
        empty = (n for n in having if not self.parameters[n].numel())
        sums |= {name: torch.empty_like(self.parts[name]) for name in empty}
        for name in names:
            self.parameters[name].grad = None
        return Arrival([work], lambda: self._add(sums))

    def take_gradients(self, names: Iterable[str]) -> None:
        """Move the rows of gradients that were summed whole to the parts, and take the gradients
        from the parameters."""
        for name in names:
            parameter, part = self.parameters[name], self.parts.get(name)
            if parameter.grad is not None and part is not None:
                part.grad = self.rows(name, parameter.grad)
            parameter.grad = None

    def gather(self) -> Iterator[Instruction]:
        """Start gathering the rows that the other data ranks have updated, line by line: yields
        each, and then starts it. A collective of the data ranks. `ready` and `arrive` wait for
        them.

        Running gathers take no more memory than the gradients that the step has freed.
        """
        self.arrive()
        freed = self.parameters if self.level == 1 else self.parts
        room, first = sum(tensor.nbytes for tensor in freed.values()), 0
        for line, names in self._behind.items():
            yield line
            arrival = self._exchange(names, self.parts, self.parameters)
            self._arriving.append(({*names}, arrival))
            room -= arrival.nbytes
            while room < 0:
                _, earlier = self._arriving[first]
                earlier.wait()
                room, first = room + earlier.nbytes, first + 1

    def joined(self, rows: Tensors, dtypes: Mapping[str, torch.dtype]) -> dict[str, torch.Tensor]:
        """Whole tensors shaped like parameters, gathered from each data rank's `rows`, in these
        dtypes. A collective of the data ranks."""
        joined: dict[str, torch.Tensor] = {}
        for bucket in self._buckets:
            names = [name for name in bucket if name in dtypes]
            whole = {n: torch.empty_like(self.parameters[n], dtype=dtypes[n]) for n in names}
            if names:
                self._exchange(names, rows, whole).wait()
            joined |= whole
        return joined

    @torch.no_grad()
    def _exchange(self, names: Sequence[str], rows: Tensors, into: Tensors) -> Arrival:
        """Start filling tensors of one dtype with the rows of all data ranks."""
        if self.whole:
            return self._give(names, rows, into)
        ranks, index = self._sharers(names[0])
        memory = [self._with_memory(names[0], into)] if len(names) == 1 else []
        segments, places = self._bucket(names, into[names[0]].dtype, memory)
        mine = [place for place in places if place.data == index]
        views = [_view(segments, place, rows[place.name]) for place in mine]
        if views and views[0].data_ptr() != rows[mine[0].name].data_ptr():
            torch._foreach_copy_(views, [rows[place.name] for place in mine])
        works = self._channels.gather(segments, ranks)
        in_place = memory and segments.data_ptr() == memory[0].data_ptr()
        nbytes = 0 if in_place else segments.nbytes
        return Arrival(works, lambda: self._copy_rows(segments, places, into), nbytes)

    def _give(self, names: Sequence[str], rows: Tensors, into: Tensors) -> Arrival:
        """Start broadcasting undivided tensors, one bucket from each data rank that holds some."""
        ranks, index = self._sharers(names[0])
        homes: dict[int, list[str]] = {}
        for name in names:
            home = next((k for k, span in enumerate(self._spans[name]) if span.size), 0)
            homes.setdefault(home, []).append(name)
        works, buffers, nbytes = [], dict[str, torch.Tensor](), 0
        for home, members in homes.items():
            sizes = [into[name].numel() for name in members]
            bucket = into[names[0]].new_empty(sum(sizes))
            for name, part in zip(members, bucket.split(sizes), strict=True):
                buffer = part.view(into[name].shape)
                if home == index:
                    buffer.copy_(rows[name].reshape(buffer.shape))
                if home != index or into is not self.parameters or name in self.in_pieces:
                    buffers[name] = buffer
            works.append(self._channels.give(bucket, ranks, home))
            nbytes += bucket.nbytes
        return Arrival(works, lambda: self._copy_wholes(buffers, into), nbytes)

    def _copy_wholes(self, buffers: Tensors, into: Tensors) -> None:
        """Fill tensors from received buffers."""
        for name, buffer in buffers.items():
            self._with_memory(name, into).copy_(buffer)

    def _copy_rows(self, segments: torch.Tensor, places: list[_Place], into: Tensors) -> None:
        """Fill tensors with the rows of a received bucket."""
        wholes = {name: self._with_memory(name, into) for name in {place.name for place in places}}
        if any(segments.data_ptr() == whole.data_ptr() for whole in wholes.values()):
            return  # the bucket is the memory of the only tensor
        in_place = into is self.parameters  # own rows are in place, unless it was in pieces
        others = [
            place
            for place in places
            if not in_place
            or place.data != self._sharers(place.name).place
            or place.name in self.in_pieces
        ]
        targets = [self.rows(place.name, wholes[place.name], place.data) for place in others]
        if others:
            torch._foreach_copy_(
                targets,
                [_view(segments, *pair) for pair in zip(others, targets, strict=True)],
            )

    def _with_memory(self, name: str, into: Tensors) -> torch.Tensor:
        """A tensor with memory to fill. Autograd must not see a change: a parameter in pieces gets
        the values that it had."""
        tensor = into[name]
        if into is not self.parameters or name not in self.in_pieces:
            return tensor
        storage = tensor.untyped_storage()
        if storage.nbytes() != self._nbytes[name]:
            storage.resize_(self._nbytes[name])
        return tensor.data

    def _free(self, name: str) -> None:
        """Free the memory of a parameter in pieces."""
        self.parameters[name].untyped_storage().resize_(0)

    def _add(self, sums: Tensors) -> None:
        """Add sums to the gradients of parts."""
        for name, gradient in sums.items():
            part = self.parts.get(name)
            if part is None:
                continue
            gradient = gradient.view_as(part)  # a scalar is a row
            if part.grad is not None:
                part.grad.add_(gradient)
            else:  # a view would keep the whole bucket in memory
                part.grad = gradient.clone() if self.whole and self.level > 1 else gradient

    def _share_out(self) -> None:
        """Deal the rows of all parameters, and make the parts of this rank."""
        self._spans: dict[str, list[Span]] = {}
        self._row_sizes: dict[str, int] = {}  # elements
        for sharers in {self._every, self._alike}:
            count = len(sharers.ranks)
            parameters = {n: p for n, p in self.parameters.items() if self._sharers(n) == sharers}
            sizes = {name: parameter.numel() for name, parameter in parameters.items()}
            ties = {n: k % count for k, n in enumerate(sorted(self._ties)) if n in parameters}
            homes = dealt(sizes, 1 if self._served else count, {} if self._served else ties)
            for name, parameter in parameters.items():
                size = parameter.shape[0] if parameter.dim() else 1
                self._row_sizes[name] = parameter.numel() // max(1, size)
                self._spans[name] = [
                    Span(0, size if k == homes[name] else 0)
                    if self.whole
                    else piece(size, count, k)
                    for k in range(count)
                ]
        self.parts = {
            name: nn.Parameter(self._own(name, parameter.detach()), parameter.requires_grad)
            for name, parameter in self.parameters.items()
            if self.span(name).size or not parameter.numel()  # all ranks have one without elements
        }
        for part in self.parts.values():
            if part.dtype == self._narrow:
                part.grad_dtype = None

    def _own(self, name: str, parameter: torch.Tensor) -> torch.Tensor:
        """The rows of this data rank: a view, or memory of their own."""
        if name not in self.in_pieces:
            return self.rows(name, parameter)
        rows = self.rows(name, torch.empty_like(parameter, device="meta"))
        return torch.empty_like(rows, device=parameter.device)

    def _bucket(
        self, names: Sequence[str], dtype: torch.dtype, memory: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, list[_Place]]:
        """A bucket with a segment of equal length for each data rank, and the places of rows in it.

        For a single tensor it is its `memory`, if its rows lie there in the same layout.
        """
        places, longest, count = [], 0, len(self._sharers(names[0]).ranks)
        for k in range(count):
            begin = 0
            for name in names:
                end = begin + self._spans[name][k].size * self._row_sizes[name]
                if end > begin:
                    places.append(_Place(name, k, begin, end))
                begin = end
            longest = max(longest, begin)
        for tensor in memory:
            if tensor.is_contiguous() and tensor.numel() == count * longest:
                return tensor.detach().view(count, longest), places
        return self.parameters[names[0]].new_empty(count, longest, dtype=dtype), places


def contiguous_gradient(tensor: torch.Tensor) -> torch.Tensor:
    """The gradient of a tensor; zeros for a tied one without, as other ranks may have one."""
    tensor.grad = in_memory(gradient_of(tensor))
    return tensor.grad


def flat(
    tensors: Sequence[torch.Tensor], dtype: torch.dtype
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A flat tensor of the gradients (zeros for missing ones), and views in their shapes."""
    bucket = tensors[0].new_empty(sum(tensor.numel() for tensor in tensors), dtype=dtype)
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
    if targets:
        torch._foreach_copy_(targets, gradients)
    return bucket, views


def _view(segments: torch.Tensor, place: _Place, like: torch.Tensor) -> torch.Tensor:
    """The rows at a place, in the shape of `like`."""
    return segments[place.data, place.begin : place.end].view(like.shape)
