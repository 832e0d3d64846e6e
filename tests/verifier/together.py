"""What all ranks compute of the vocabulary, in symbols: the collectives have no names, only order.

A part of what all ranks make is the rank with the term of the whole. Parts that do not belong
together, and a collective that is not the same one on all ranks, are wrong.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from torch import fx

from parcompiler.graph import dtype_of, shape_of
from parcompiler.instruction import Instruction, Kind
from parcompiler.lower.lowered import Spread
from tests.verifier.whole import Gradient, Wrong, add_parameters

if TYPE_CHECKING:
    from tests.verifier.oracle import Rank

Key = tuple[str, int]
Contents = TypeVar("Contents", int, Gradient)

FIRST = {"naive": "maximum", "interlaced": "maximum", "vocab-1": "statistics"}


@dataclass
class Meeting:
    """A collective that a rank has begun: what each brought, as it comes in."""

    brought: dict[int, tuple[object, Any]]
    ranks: int

    @property
    def ready(self) -> bool:
        return len(self.brought) == self.ranks

    def parts(self) -> dict[int, Any]:
        """What all brought, if all meant the same collective."""
        if len({what for what, _ in self.brought.values()}) > 1:
            raise Wrong
        return {rank: part for rank, (_, part) in self.brought.items()}

    def whole(self) -> Any:
        """What the parts are parts of: each rank has brought its own."""
        parts = self.parts()
        wholes = [part for rank, (owner, part) in parts.items() if owner == rank]
        if len(wholes) < self.ranks or any(part != wholes[0] for part in wholes):
            raise Wrong
        return wholes[0]


@dataclass
class Sum:
    """A receipt of what all ranks add up on this one."""

    meeting: Meeting

    @property
    def ready(self) -> bool:
        return self.meeting.ready

    def take(self, kind: type[Contents]) -> Contents:
        """The sum. Wrong if it is no value (int) or no gradient (Counter), as expected."""
        whole = self.meeting.whole()
        if not isinstance(whole, kind):
            raise Wrong
        return whole


class Together:
    """The verbs of one rank."""

    def __init__(self, rank: Rank, spread: Spread | None) -> None:
        self.rank = rank
        self.spread = spread
        self.first = FIRST.get(spread.method if spread else "", "statistics")
        self.last = {"maximum": "sum"}.get(self.first, "statistics")
        self.begun = 0
        self.embedded: dict[Key, int] = {}
        self.gradients: dict[Key, Meeting] = {}
        self.x: dict[int, Meeting] = {}
        self.values: dict[int, dict[fx.Node, int]] = {}  # of the head: from S to T
        self.stated: dict[int, int] = {}  # the loss, by S or NORMALIZE, before its exchange
        self.exchanges: dict[int, tuple[str, Meeting]] = {}
        self.x_gradients: dict[int, Gradient] = {}
        self.returned: set[int] = set()  # the micro-batches whose gradient of x has left

    def step(self, line: Instruction) -> bool:
        """Execute an instruction; False if it must wait."""
        if self.spread is None:
            raise Wrong
        if line.microbatch not in range(self.rank.machine.lowered.microbatches):
            raise Wrong
        verbs = {
            Kind.EMBED: self._embed,
            Kind.EMBED_BACKWARD: self._embed_backward,
            Kind.BROADCAST: self._broadcast,
            Kind.REDUCE: self._reduce,
            Kind.EXCHANGE: self._exchange,
            Kind.S: self._s,
            Kind.NORMALIZE: self._normalize,
            Kind.T: self._t,
        }
        assert line.microbatch is not None
        if line.kind in (Kind.T, Kind.EMBED_BACKWARD) and not self.rank.machine.training:
            raise Wrong
        return verbs[line.kind](line, line.microbatch)

    @property
    def holds(self) -> bool:
        """Whether something is kept that was to be used."""
        kept = [self.embedded, self.gradients, self.x, self.stated, self.x_gradients]
        return any(kept) or (self.rank.machine.training and bool(self.values or self.exchanges))

    def settled(self) -> bool:
        """Take the losses of all exchanges; False while some are under way."""
        return all([self._loss(i) for i in [*self.exchanges]])

    def _computed(self, node: fx.Node, inputs: Iterable[str], i: int, more: Any = ()) -> Any:
        """The term of a node, and the values that it is computed from."""
        machine = self.rank.machine
        values = dict(more)
        values |= {machine.nodes[name]: machine.batch(name, i) for name in inputs}
        self.rank.memory.execute([node], values)
        return values

    def _begin(self, what: object, part: object) -> Meeting:
        """Bring something to the next collective."""
        everyone = self.rank.machine.meetings["vocabulary", self.begun]
        self.begun += 1
        everyone[self.rank.rank] = (what, part)
        return Meeting(everyone, len(self.rank.machine.ranks))

    def _embed(self, line: Instruction, i: int) -> bool:
        item = self._lookup(line)
        values = self._computed(item.layer.node, item.inputs, i)
        _put(self.embedded, (item.value, i), values[item.layer.node])
        return True

    def _lookup(self, line: Instruction) -> Any:
        assert self.spread is not None
        (item,) = (item for item in self.spread.lookups if item.value == line.value)
        return item

    def _embed_backward(self, line: Instruction, i: int) -> bool:
        item = self._lookup(line)
        key = (item.value, i)
        if not self.gradients[key].ready:
            return False
        peers = self.gradients.pop(key).parts()
        (given,) = (part for part in peers.values() if part is not None)
        if not isinstance(given, Counter):
            raise Wrong
        values = self._computed(item.layer.node, item.inputs, i)
        gradients = self._back(item.layer.node, values, given)
        add_parameters(self.rank.machine.lowered.graph, gradients, self.rank.gradients)
        return True

    def _back(self, node: fx.Node, values: dict[fx.Node, int], given: Gradient) -> Any:
        """The gradients of what a node reads."""
        gradients: defaultdict[fx.Node, Gradient] = defaultdict(Counter)
        gradients[node] += given
        self.rank.memory.back([node], values, gradients)
        return gradients

    def _broadcast(self, line: Instruction, i: int) -> bool:
        assert line.value is not None
        key = line.value, i
        own: int | Gradient | None = None
        self._check(line.value)
        if line.peer == self.rank.rank:
            assert line.peer is not None
            if line.gradient:
                readers = [s for s in self.rank.machine.on(line.peer) if line.value in s.receives]
                if not readers or self.rank.back_through[key] < len(readers):
                    raise Wrong
                own = Counter(self.rank.leaves[key])
            else:
                own = self.rank.results[key]
        if line.peer not in range(len(self.rank.machine.ranks)):
            raise Wrong
        meeting = self._begin((line.kind, line.peer, shape_of(self._node(line.value))), own)
        if line.gradient:
            self._lookup(line)
            _put(self.gradients, key, meeting)
        elif self.spread and self.spread.head and self.spread.head.value == line.value:
            _put(self.x, i, meeting)
        else:
            raise Wrong
        return True

    def _node(self, name: str) -> fx.Node:
        return self.rank.machine.nodes[name]

    def _check(self, name: str) -> None:
        """The buffer is as large as what comes into it."""
        value, node = self.rank.machine.lowered.values[name], self._node(name)
        if (tuple(value.shape), value.dtype) != (shape_of(node), dtype_of(node)):
            raise Wrong

    def _reduce(self, line: Instruction, i: int) -> bool:
        assert line.value is not None and self.spread is not None
        self._check(line.value)
        if line.peer not in range(len(self.rank.machine.ranks)):
            raise Wrong
        part: object
        if line.gradient:
            if self.spread.head is None or line.value != self.spread.head.value:
                raise Wrong
            if i not in self.x_gradients:
                if self.spread.method != "vocab-2":
                    raise Wrong
                if i not in self.exchanges and i not in self.rank.losses:
                    raise Wrong  # it goes on when the exchange has ended, and waits beside
                part = self._head_gradients(i)[self.spread.head.layer.x]
            else:
                part = self.x_gradients.pop(i)
            self.returned.add(i)
        else:
            part = self.embedded.pop((line.value, i))
        what = (line.kind, line.peer, shape_of(self._node(line.value)))
        meeting = self._begin(what, (self.rank.rank, part))
        if line.peer == self.rank.rank:
            if line.gradient:
                self.rank.gradient_receipts[line.value, i].append(Sum(meeting))
            else:
                _put(self.rank.receipts, (line.value, i), Sum(meeting))
        return True

    def _exchange(self, line: Instruction, i: int) -> bool:
        if line.value not in (self.first, self.last):
            raise Wrong
        key = (line.value, self.stated.pop(i))
        part = (self.rank.rank, key)
        assert line.value is not None
        _put(self.exchanges, i, (line.value, self._begin((line.kind, line.value), part)))
        return True

    def _s(self, line: Instruction, i: int) -> bool:
        assert self.spread is not None
        head = self.spread.head
        if head is None:
            raise Wrong
        if not self.x[i].ready:
            return False
        (x,) = (part for part in self.x.pop(i).parts().values() if part is not None)
        if not isinstance(x, int):
            raise Wrong
        values = self._computed(head.layer.node, head.inputs, i, {head.layer.x: x})
        _put(self.values, i, values)
        _put(self.stated, i, values[head.layer.node])
        return True

    def _normalize(self, line: Instruction, i: int) -> bool:
        what, meeting = self.exchanges[i]
        if self.first == self.last or what != self.first:
            raise Wrong
        if not meeting.ready:
            return False
        del self.exchanges[i]
        _, stated = meeting.whole()
        _put(self.stated, i, stated)
        return True

    def _loss(self, i: int) -> bool:
        """Take what the last exchange says; False while it is under way."""
        if i in self.rank.losses:
            if i in self.exchanges:
                raise Wrong
            return True
        what, meeting = self.exchanges[i]
        if what != self.last:
            raise Wrong
        if not meeting.ready:
            return False
        del self.exchanges[i]
        _, self.rank.losses[i] = meeting.whole()
        return True

    def _head_gradients(self, i: int) -> Any:
        """The gradients of all that the head reads."""
        assert self.spread is not None and self.spread.head is not None
        one: Gradient = Counter({self.rank.machine.terms("one"): 1})
        return self._back(self.spread.head.layer.node, self.values[i], one)

    def _t(self, line: Instruction, i: int) -> bool:
        assert self.spread is not None
        if self.spread.head is None:
            raise Wrong
        if not self._loss(i):
            return False
        gradients = self._head_gradients(i)
        del self.values[i]
        if i not in self.returned:
            self.x_gradients[i] = gradients[self.spread.head.layer.x]
        add_parameters(self.rank.machine.lowered.graph, gradients, self.rank.gradients)
        return True


def _put(kept: dict[Any, Any], key: object, item: object) -> None:
    """Keep something; what is there already would be lost."""
    if key in kept:
        raise Wrong
    kept[key] = item
