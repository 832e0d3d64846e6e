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
            blocks      that run again: bytes of choices and shared costs, times a weight
Decide      x[g,s]      whether decision g has choice s
            e[k,a,t]    whether edge k leads from type a to type t
            z[q]        whether shared cost q is due
Minimize    sum of c x, and the seconds of the shared costs that are due
Subject to  each decision has one choice                    sum over s of x[g,s] = 1     (_choose)
            an edge leads from the type that g gives        sum over t of e[k,a,t] = x   (_connect)
            to the type that h needs                        sum over a of e[k,a,t] = x   (_connect)
            a shared cost is due with each of its events    z[q] >= e or x               (_share)
            memory suffices, with any one block             bytes <= budget              (_limits)

This is the formulation of Alpa's intra-operator pass (2201.12023, section 4.2), except for the
costs that edges share. Its linear relaxation is nearly always integral (it is a chain of small
transport problems), so it is solved first. Edges with one type at an end need no variables of their
own, nor do shared costs with one event. The number of variables depends only on the distinct layers
of a model: blocks of one template are one here, with their seconds times their number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from parcompiler.errors import InfeasibleError
from parcompiler.plan import Solution
from parcompiler.solver import ROUNDING, Constraint, SolverModel, Term, Variable, solve
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


@dataclass(frozen=True, slots=True)
class BlockBytes:
    """What a block holds for its backward when it runs again: bytes of each choice, by decision,
    and shared costs."""

    decisions: tuple[tuple[int, tuple[float, ...]], ...]
    shared: tuple[SharedCost, ...]


@dataclass(frozen=True)
class Programme:
    """The data of the programme. `budget` is None where memory does not matter; `blocks` are those
    that run again, whose bytes count `weight` times."""

    decisions: tuple[Decision, ...]
    edges: tuple[Edge, ...]
    shared: tuple[SharedCost, ...]
    budget: float | None = None
    blocks: tuple[BlockBytes, ...] = ()
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Answer:
    """A choice of each decision, their bytes, and the solver's bound and gap of the seconds.
    `is_short` says that faster choices do not fit into the memory."""

    choices: tuple[int, ...]
    nbytes: float
    solution: Solution = field(repr=False)
    is_short: bool = False


def decide(data: Programme) -> Answer:
    """The choices with the fewest seconds. Raises InfeasibleError when there are none."""
    return ProgrammeSolver(data).within()


class ProgrammeSolver:
    """The programme as a linear model, solved for several shares of its memory."""

    def __init__(self, data: Programme) -> None:
        self.data = data
        self.model = SolverModel()
        self.seconds: list[Term] = []
        self.bytes: list[Term] = []
        self.variables = [self._choose(decision) for decision in data.decisions]
        self.edge_terms = [self._connect(edge) for edge in data.edges]
        for number, cost in enumerate(data.shared):
            self._share(f"z[{number}]", cost)

    def within(self, part: float = 1.0) -> Answer:
        """The choices with the fewest seconds that fit into a part of the budget.

        Raises InfeasibleError when there are none.
        """
        if self.data.budget is None:
            return self.free
        budget, nothing = part * self.data.budget, "no choices fit into the memory"
        if sum(min(x.nbytes) for x in self.data.decisions) > budget:
            raise InfeasibleError(nothing)
        if fits(self.data, self.free, budget):
            return self.free
        if self.least.solution.bound > (1 + ROUNDING) * budget:  # GLOP needs two runs to tell
            raise InfeasibleError(nothing)
        limits = [*self._limits(budget)]  # may add rows to the model
        return replace(self._answer(self.seconds, MICRO, limits), is_short=True)

    @cached_property
    def free(self) -> Answer:
        """The choices with the fewest seconds where memory does not matter. Raises InfeasibleError
        when there are none."""
        return self._answer(self.seconds, MICRO)

    @cached_property
    def least(self) -> Answer:
        """The choices with the fewest bytes. Raises InfeasibleError when there are none."""
        return self._answer(self.bytes, MEGA)

    def _answer(
        self, objective: Sequence[Term], unit: float, limits: Sequence[Constraint] = ()
    ) -> Answer:
        """The choices with the least objective, whose terms are in `unit`, within these limits."""
        model = replace(self.model, rows=[*self.model.rows, *limits])
        model.minimize(objective)
        solved = solve(model, relax=True)
        values = ([solved[variable] for variable in variables] for variables in self.variables)
        choices = tuple(max(range(len(x)), key=x.__getitem__) for x in values)
        bound = Solution(solved.status, solved.objective / unit, solved.bound / unit, solved.gap)
        return Answer(choices, bytes_of(self.data, choices), bound)

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

    def _share(self, name: str, cost: SharedCost) -> None:
        """A shared cost is due if any of its events occurs."""
        if cost.seconds or cost.nbytes:
            self._cost(self._due(name, cost), cost.seconds, cost.nbytes)

    def _due(self, name: str, cost: SharedCost) -> list[Term]:
        """Terms whose sum is 1 if a shared cost is due."""
        events = [terms for event in cost.events if (terms := self._terms(event))]
        if len(events) < 2:
            return events[0] if events else []
        due = self.model.binary(name)
        for terms in events:
            self.model.constrain([(1, due), *_negative(terms)], low=0)
        return [(1, due)]

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

    def _limits(self, budget: float) -> Iterator[Constraint]:
        """Memory suffices; no constraint is needed where all choices together would fit."""
        for terms in self._sums:
            if sum(count for count, _ in terms) > budget * MEGA:
                yield Constraint(terms, -math.inf, budget * MEGA)

    @cached_property
    def _sums(self) -> list[tuple[Term, ...]]:
        """The bytes of all choices, and with those of each block that runs again."""
        sums = [self.bytes]
        for number, block in enumerate(self.data.blocks):
            sums.append([*self.bytes, *self._held(number, block)])
        rows = []
        for terms in sums:
            total: dict[Variable, float] = {}
            for count, variable in terms:
                total[variable] = total.get(variable, 0.0) + count
            rows.append(tuple((count, variable) for variable, count in total.items()))
        return rows

    def _held(self, number: int, block: BlockBytes) -> Iterator[Term]:
        """The bytes of a block that runs again."""
        each = MEGA * self.data.weight
        for decision, nbytes in block.decisions:
            for size, variable in zip(nbytes, self.variables[decision], strict=True):
                if size:
                    yield size * each, variable
        for place, cost in enumerate(block.shared):
            for count, variable in self._due(f"y[{number},{place}]", cost):
                yield count * cost.nbytes * each, variable


def _negative(terms: Sequence[Term]) -> Iterator[Term]:
    return ((-count, variable) for count, variable in terms)


def bytes_of(data: Programme, choices: Sequence[int]) -> float:
    """The bytes of these choices."""
    costs = (decision.nbytes[s] for decision, s in zip(data.decisions, choices, strict=True))
    return sum(costs) + sum(cost.nbytes for cost in filter(due(data, choices), data.shared))


def fits(data: Programme, answer: Answer, budget: float) -> bool:
    """Whether these bytes suffice for an answer."""
    is_due, choices = due(data, answer.choices), answer.choices

    def held(block: BlockBytes) -> float:
        decided = sum(nbytes[choices[decision]] for decision, nbytes in block.decisions)
        return decided + sum(cost.nbytes for cost in filter(is_due, block.shared))

    most = max(map(held, data.blocks), default=0.0) * data.weight
    return answer.nbytes + most <= budget


def due(data: Programme, choices: Sequence[int]) -> Callable[[SharedCost], bool]:
    """A function that says whether a shared cost has an event that occurs."""
    pairs = [pair_of(edge, choices) for edge in data.edges]

    def occurs(event: Event) -> bool:
        if isinstance(event, ChoiceEvent):
            return choices[event.decision] in event.choices
        return pairs[event.edge] in event.pairs

    return lambda cost: any(map(occurs, cost.events))


def pair_of(edge: Edge, choices: Sequence[int]) -> Pair:
    """The types at the ends of an edge under these choices."""
    source, target = edge.source, edge.target
    return source.types[choices[source.decision]], target.types[choices[target.decision]]
