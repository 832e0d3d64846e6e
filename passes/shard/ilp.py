"""The integer programme that gives every group of nodes one of its strategies.

    decision 0          edge              decision 1           nodes that are decided together
    R S(0) -> S(2)  ────────────────►   S(2) S(1) -> P
    R R    -> R       R → S(2)?         R    R    -> R

Given       c[g,s]      seconds of choice s of decision g, and b[g,s], its bytes
            edges       (g, h), with the type a that each choice of g gives, the type t that each
                        choice of h needs, and the pairs (a, t) for which there is a conversion
            costs       seconds and bytes of a conversion or a value that several edges share: due
                        once when any of several events (a choice, or a pair of types) occurs
            budget      of bytes
Decide      x[g,s]      whether decision g has choice s
            e[k,a,t]    whether edge k leads from type a to type t
            z[q]        whether shared cost q is due
Minimize    sum of c x, and the seconds of the shared costs that are due
Subject to  each decision has one choice                    sum over s of x[g,s] = 1     (_choose)
            an edge leads from the type that g gives        sum over t of e[k,a,t] = x   (_connect)
            to the type that h needs                        sum over a of e[k,a,t] = x   (_connect)
            a shared cost is due with each of its events    z[q] >= e or x               (_share)
            memory suffices                                 bytes <= budget              (_fit)

This is the formulation of Alpa's intra-operator pass (2201.12023, section 4.2), except for the
costs that edges share. Its linear relaxation is nearly always integral (it is a chain of small
transport problems), so it is solved first. Edges with one type at an end need no variables of their
own, nor do shared costs with one event. The number of variables depends only on the distinct layers
of a model: blocks of one template are one here, with their seconds times their number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from parcompiler.errors import InfeasibleError
from parcompiler.plan import Solution
from parcompiler.solver import SolverModel, Term, Variable, solve
from parcompiler.spmd import Placement

Pair = tuple[Placement, Placement]
MICRO = 1e6  # the solver counts in microseconds: its tolerance is absolute
MEGA = 1e-6  # and in megabytes


@dataclass(frozen=True, slots=True)
class Decision:
    """Nodes that are decided together, or a tensor: the seconds and the bytes of each choice."""

    name: str
    seconds: tuple[float, ...]
    nbytes: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class EdgeEnd:
    """One end of an edge: a decision, and the type there under each of its choices."""

    decision: int
    types: tuple[Placement, ...]


@dataclass(frozen=True, slots=True)
class Edge:
    """A value from its maker to a reader, and the pairs of types that it may have at the ends."""

    name: str
    source: EdgeEnd
    target: EdgeEnd
    allowed: frozenset[Pair]


@dataclass(frozen=True, slots=True)
class EdgeEvent:
    """The event that an edge has one of these pairs of types."""

    edge: int
    pairs: frozenset[Pair]


@dataclass(frozen=True, slots=True)
class ChoiceEvent:
    """The event that a decision has one of these choices."""

    decision: int
    choices: frozenset[int]


Event = EdgeEvent | ChoiceEvent


@dataclass(frozen=True, slots=True)
class SharedCost:
    """Seconds and bytes that are due once when any of the events occurs."""

    events: tuple[Event, ...]
    seconds: float = 0.0
    nbytes: float = 0.0


@dataclass(frozen=True)
class Programme:
    """The data of the programme. `budget` is None where memory does not matter."""

    decisions: tuple[Decision, ...]
    edges: tuple[Edge, ...]
    shared: tuple[SharedCost, ...]
    budget: float | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """A choice of each decision, their bytes, and the solver's bound and gap of the seconds."""

    choices: tuple[int, ...]
    nbytes: float
    solution: Solution = field(repr=False)


def decide(data: Programme, *, least_memory: bool = False) -> Answer:
    """The choices with the fewest seconds, or with the fewest bytes.

    Raises InfeasibleError when there are none.
    """
    if data.budget is not None and sum(min(x.nbytes) for x in data.decisions) > data.budget:
        message = "no choices fit into the memory"
        raise InfeasibleError(message)
    linear = LinearModel(data)
    weight = MEGA if least_memory else MICRO
    linear.model.minimize(linear.bytes if least_memory else linear.seconds)
    solved = solve(linear.model, relax=True)
    values = ([solved[variable] for variable in variables] for variables in linear.variables)
    choices = tuple(max(range(len(x)), key=x.__getitem__) for x in values)
    bound = Solution(solved.status, solved.objective / weight, solved.bound / weight, solved.gap)
    return Answer(choices, bytes_of(data, choices), bound)


class LinearModel:
    """The programme as a linear model."""

    def __init__(self, data: Programme) -> None:
        self.data = data
        self.model = SolverModel()
        self.seconds: list[Term] = []
        self.bytes: list[Term] = []
        self.variables = [self._choose(decision) for decision in data.decisions]
        self.edge_terms = [self._connect(edge) for edge in data.edges]
        for number, cost in enumerate(data.shared):
            self._share(number, cost)
        self._fit()

    def _choose(self, decision: Decision) -> list[Variable]:
        """Each decision has one choice."""
        number = len(decision.seconds)
        if number == 1:
            variables = [self.model.integer(f"x[{decision.name},0]", 1, 1)]
        else:
            variables = [self.model.binary(f"x[{decision.name},{k}]") for k in range(number)]
            self.model.constrain([(1, variable) for variable in variables], low=1, high=1)
        for x, seconds, nbytes in zip(variables, decision.seconds, decision.nbytes, strict=True):
            self._cost([(1, x)], seconds, nbytes)
        return variables

    def _connect(self, edge: Edge) -> dict[Pair, list[Term]]:
        """An edge leads from the type that its source gives to the type that its target needs."""
        offered, needed = self._by_type(edge.source), self._by_type(edge.target)
        pairs = [(a, t) for a in offered for t in needed]
        for a in offered:
            if not any((a, t) in edge.allowed for t in needed):
                self.model.constrain(offered[a], low=0, high=0)
        for t in needed:
            if not any((a, t) in edge.allowed for a in offered):
                self.model.constrain(needed[t], low=0, high=0)
        allowed = [pair for pair in pairs if pair in edge.allowed]
        if len(offered) == 1:
            return {(a, t): needed[t] for a, t in allowed}
        if len(needed) == 1:
            return {(a, t): offered[a] for a, t in allowed}
        terms: dict[Pair, list[Term]] = {
            (a, t): [(1, self.model.binary(f"e[{edge.name},{a},{t}]"))] for a, t in allowed
        }
        for a, choices in offered.items():
            leaving = [term for pair in allowed if pair[0] == a for term in terms[pair]]
            self.model.constrain([*leaving, *_negative(choices)], low=0, high=0)
        for t, choices in needed.items():
            coming = [term for pair in allowed if pair[1] == t for term in terms[pair]]
            self.model.constrain([*coming, *_negative(choices)], low=0, high=0)
        return terms

    def _by_type(self, end: EdgeEnd) -> dict[Placement, list[Term]]:
        """The choices of the decision at this end of an edge, by the type that they give it."""
        terms: dict[Placement, list[Term]] = {}
        for variable, placement in zip(self.variables[end.decision], end.types, strict=True):
            terms.setdefault(placement, []).append((1, variable))
        return terms

    def _share(self, number: int, cost: SharedCost) -> None:
        """A shared cost is due if any of its events occurs."""
        events = [terms for event in cost.events if (terms := self._terms(event))]
        if not events or not (cost.seconds or cost.nbytes):
            return
        if len(events) == 1:
            self._cost(events[0], cost.seconds, cost.nbytes)
            return
        due = self.model.binary(f"z[{number}]")
        for terms in events:
            self.model.constrain([(1, due), *_negative(terms)], low=0)
        self._cost([(1, due)], cost.seconds, cost.nbytes)

    def _terms(self, event: Event) -> list[Term]:
        """Terms whose sum is 1 when an event occurs."""
        if isinstance(event, ChoiceEvent):
            return [(1, self.variables[event.decision][choice]) for choice in sorted(event.choices)]
        by_pair = self.edge_terms[event.edge]
        if len(event.pairs) == 1:  # nearly always
            (only,) = event.pairs
            return by_pair.get(only, [])
        return [term for pair, terms in by_pair.items() if pair in event.pairs for term in terms]

    def _cost(self, terms: Sequence[Term], seconds: float, nbytes: float) -> None:
        """Add seconds to the objective, and bytes to the memory."""
        if seconds:
            self.seconds += [(count * seconds * MICRO, variable) for count, variable in terms]
        if nbytes:
            self.bytes += [(count * nbytes * MEGA, variable) for count, variable in terms]

    def _fit(self) -> None:
        """Memory suffices; no constraint is needed where all choices together would fit."""
        if self.data.budget is not None:
            budget = self.data.budget * MEGA
            if sum(count for count, _ in self.bytes) > budget:
                total: dict[Variable, float] = {}
                for count, variable in self.bytes:
                    total[variable] = total.get(variable, 0.0) + count
                terms = [(count, variable) for variable, count in total.items()]
                self.model.constrain(terms, high=budget)


def _negative(terms: Sequence[Term]) -> Iterator[Term]:
    return ((-count, variable) for count, variable in terms)


def bytes_of(data: Programme, choices: Sequence[int]) -> float:
    """The bytes of these choices."""
    costs = (decision.nbytes[s] for decision, s in zip(data.decisions, choices, strict=True))
    return sum(costs) + sum(cost.nbytes for cost in due(data, choices))


def due(data: Programme, choices: Sequence[int]) -> Iterator[SharedCost]:
    """The shared costs with an event that occurs."""
    pairs = [pair_of(edge, choices) for edge in data.edges]

    def occurs(event: Event) -> bool:
        if isinstance(event, ChoiceEvent):
            return choices[event.decision] in event.choices
        return pairs[event.edge] in event.pairs

    return (cost for cost in data.shared if any(map(occurs, cost.events)))


def pair_of(edge: Edge, choices: Sequence[int]) -> Pair:
    """The types at the ends of an edge under these choices."""
    source, target = edge.source, edge.target
    return source.types[choices[source.decision]], target.types[choices[target.decision]]
