"""The programme that gives every group of nodes one of its strategies.

    group 0             edge              group 1              nodes that are decided together
    R S(0) -> S(2)  ────────────────►   S(2) S(1) -> P
    R R    -> R       R → S(2)?         R    R    -> R

Given       c[g,s]      seconds of choice s of group g, and b[g,s], its bytes
            edges       (g, h), with the type a that each choice of g gives, the type t that each
                        choice of h needs, and the pairs (a, t) that a conversion leads through
            charges     seconds and bytes that are due once when one of several events is so: a
                        choice of a group, or a pair of types on an edge
            budget      of bytes
Decide      x[g,s]      whether group g has choice s
            e[k,a,t]    whether edge k leads from type a to type t
            z[q]        whether charge q is due
Minimize    sum of c x, and the seconds of the charges that are due
Subject to  each group has one choice                       sum over s of x[g,s] = 1
            an edge leads from what there is                sum over t of e[k,a,t] = x, g gives a
            and to what is needed                           sum over a of e[k,a,t] = x, h needs t
            a charge is due with each of its events         z[q] >= e or x
            what is kept fits                               bytes of choices and charges <= budget

The linear relaxation of this is nearly always whole (it is a chain of small transport problems), so
it is solved first. Edges with one type at an end need no variables of their own, nor charges with
one event. The number of variables depends on the distinct layers of a model, not on their number:
what many blocks have in common stands here once, with its seconds times their number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from parcompiler.plan import Solution
from parcompiler.solver import Model, Term, Variable, solve
from parcompiler.spmd import Placement

Pair = tuple[Placement, Placement]
MICRO = 1e6  # the solver counts in microseconds: its tolerance is absolute
MEGA = 1e-6  # and in megabytes


@dataclass(frozen=True, slots=True)
class Group:
    """What is decided together: the seconds and the bytes of each choice."""

    name: str
    seconds: tuple[float, ...]
    nbytes: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class End:
    """One end of an edge: a group, and the type there under each of its choices."""

    group: int
    types: tuple[Placement, ...]


@dataclass(frozen=True, slots=True)
class Edge:
    """A value on its way to who needs it, and the pairs of types that it may have at both ends."""

    name: str
    source: End
    target: End
    allowed: frozenset[Pair]


@dataclass(frozen=True, slots=True)
class Passing:
    """An event: an edge leads through one of these pairs."""

    edge: int
    pairs: frozenset[Pair]


@dataclass(frozen=True, slots=True)
class Choosing:
    """An event: a group has one of these choices."""

    group: int
    choices: frozenset[int]


Event = Passing | Choosing


@dataclass(frozen=True, slots=True)
class Charge:
    """What is due once when any of its events is so."""

    events: tuple[Event, ...]
    seconds: float = 0.0
    nbytes: float = 0.0


@dataclass(frozen=True)
class Programme:
    """The data. `budget` is None where memory does not matter."""

    groups: tuple[Group, ...]
    edges: tuple[Edge, ...]
    charges: tuple[Charge, ...]
    budget: float | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """A choice of each group, the bytes that it takes, and what the solver says of its seconds."""

    choices: tuple[int, ...]
    nbytes: float
    solution: Solution = field(repr=False)


def decide(data: Programme, *, least_memory: bool = False) -> Answer:
    """The choices with the fewest seconds, or with the fewest bytes.

    Raises InfeasibleError when there are none.
    """
    built = _Built(data)
    weight = MEGA if least_memory else MICRO
    built.model.minimize(built.bytes if least_memory else built.seconds)
    found = solve(built.model, relax=True)
    choices = tuple(_chosen([found[variable] for variable in own]) for own in built.chosen)
    bound = Solution(found.status, found.objective / weight, found.bound / weight, found.gap)
    return Answer(choices, bytes_of(data, choices), bound)


def _chosen(values: Sequence[float]) -> int:
    """The choice whose variable is 1."""
    return max(range(len(values)), key=values.__getitem__)


def size(data: Programme) -> tuple[int, int]:
    """The number of variables and of constraints."""
    model = _Built(data).model
    return len(model.variables), len(model.rows)


class _Built:
    """The programme as a linear model."""

    def __init__(self, data: Programme) -> None:
        self.data = data
        self.model = Model()
        self.seconds: list[Term] = []
        self.bytes: list[Term] = []
        self.chosen = [self._choose(group) for group in data.groups]
        self.passing = [self._lead(edge) for edge in data.edges]
        for number, charge in enumerate(data.charges):
            self._charge(number, charge)
        self._fit()

    def _choose(self, group: Group) -> list[Variable]:
        """Each group has one choice."""
        number = len(group.seconds)
        if number == 1:
            own = [self.model.integer(f"x[{group.name},0]", 1, 1)]
        else:
            own = [self.model.binary(f"x[{group.name},{choice}]") for choice in range(number)]
            self.model.constrain([(1, variable) for variable in own], low=1, high=1)
        for variable, seconds, nbytes in zip(own, group.seconds, group.nbytes, strict=True):
            self._cost([(1, variable)], seconds, nbytes)
        return own

    def _lead(self, edge: Edge) -> dict[Pair, list[Term]]:
        """An edge leads from the type that there is to the type that is needed."""
        given, needed = self._by_type(edge.source), self._by_type(edge.target)
        pairs = [(a, t) for a in given for t in needed]
        for a in given:
            if not any((a, t) in edge.allowed for t in needed):
                self._never(given[a])
        for t in needed:
            if not any((a, t) in edge.allowed for a in given):
                self._never(needed[t])
        allowed = [pair for pair in pairs if pair in edge.allowed]
        if len(given) == 1:
            return {(a, t): needed[t] for a, t in allowed}
        if len(needed) == 1:
            return {(a, t): given[a] for a, t in allowed}
        terms: dict[Pair, list[Term]] = {
            (a, t): [(1, self.model.binary(f"e[{edge.name},{a},{t}]"))] for a, t in allowed
        }
        for a, choices in given.items():
            leaving = [term for pair in allowed if pair[0] == a for term in terms[pair]]
            self.model.constrain([*leaving, *_negative(choices)], low=0, high=0)
        for t, choices in needed.items():
            coming = [term for pair in allowed if pair[1] == t for term in terms[pair]]
            self.model.constrain([*coming, *_negative(choices)], low=0, high=0)
        return terms

    def _by_type(self, end: End) -> dict[Placement, list[Term]]:
        """The choices of a group by the type that an end has under them."""
        found: dict[Placement, list[Term]] = {}
        for variable, placement in zip(self.chosen[end.group], end.types, strict=True):
            found.setdefault(placement, []).append((1, variable))
        return found

    def _never(self, choices: Sequence[Term]) -> None:
        """No conversion leads from, or to, a type."""
        self.model.constrain(choices, low=0, high=0)

    def _charge(self, number: int, charge: Charge) -> None:
        """A charge is due with each of its events."""
        events = [terms for event in charge.events if (terms := self._terms(event))]
        if not events or not (charge.seconds or charge.nbytes):
            return
        if len(events) == 1:
            self._cost(events[0], charge.seconds, charge.nbytes)
            return
        due = self.model.binary(f"z[{number}]")
        for terms in events:
            self.model.constrain([(1, due), *_negative(terms)], low=0)
        self._cost([(1, due)], charge.seconds, charge.nbytes)

    def _terms(self, event: Event) -> list[Term]:
        """The sum that is 1 when an event is so."""
        if isinstance(event, Choosing):
            return [(1, self.chosen[event.group][choice]) for choice in sorted(event.choices)]
        passing = self.passing[event.edge]
        if len(event.pairs) == 1:  # as nearly all have
            (only,) = event.pairs
            return passing.get(only, [])
        return [term for pair, terms in passing.items() if pair in event.pairs for term in terms]

    def _cost(self, terms: Sequence[Term], seconds: float, nbytes: float) -> None:
        """Add to the objective, and to what is kept."""
        if seconds:
            self.seconds += [(count * seconds * MICRO, variable) for count, variable in terms]
        if nbytes:
            self.bytes += [(count * nbytes * MEGA, variable) for count, variable in terms]

    def _fit(self) -> None:
        """What is kept fits; there is nothing to demand where all of it at once would."""
        if self.data.budget is not None:
            budget = self.data.budget * MEGA
            if sum(count for count, _ in self.bytes) > budget:
                self.model.constrain(_added(self.bytes), high=budget)


def _negative(terms: Sequence[Term]) -> Iterator[Term]:
    return ((-count, variable) for count, variable in terms)


def _added(terms: Sequence[Term]) -> list[Term]:
    """The same sum with each variable once."""
    found: dict[Variable, float] = {}
    for count, variable in terms:
        found[variable] = found.get(variable, 0.0) + count
    return [(count, variable) for variable, count in found.items()]


def is_possible(data: Programme, choices: Sequence[int]) -> bool:
    """Whether every edge leads through a pair that is allowed, and all that is kept fits."""
    leads = all(_pair(edge, choices) in edge.allowed for edge in data.edges)
    return leads and (data.budget is None or bytes_of(data, choices) <= data.budget)


def seconds_of(data: Programme, choices: Sequence[int]) -> float:
    """What the programme minimizes."""
    own = (group.seconds[s] for group, s in zip(data.groups, choices, strict=True))
    return sum(own) + sum(charge.seconds for charge in due(data, choices))


def bytes_of(data: Programme, choices: Sequence[int]) -> float:
    """What is kept."""
    own = (group.nbytes[s] for group, s in zip(data.groups, choices, strict=True))
    return sum(own) + sum(charge.nbytes for charge in due(data, choices))


def due(data: Programme, choices: Sequence[int]) -> Iterator[Charge]:
    """The charges of which an event is so."""
    pairs: Mapping[int, Pair] = {k: _pair(edge, choices) for k, edge in enumerate(data.edges)}

    def happens(event: Event) -> bool:
        if isinstance(event, Choosing):
            return choices[event.group] in event.choices
        return pairs[event.edge] in event.pairs

    return (charge for charge in data.charges if any(map(happens, charge.events)))


def _pair(edge: Edge, choices: Sequence[int]) -> Pair:
    source, target = edge.source, edge.target
    return source.types[choices[source.group]], target.types[choices[target.group]]
