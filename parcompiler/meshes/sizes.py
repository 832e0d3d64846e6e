"""Micro-batches of other sizes: a step of equal rows in fewer larger, or more smaller ones.

rows of a step = micro-batches · rows of each          constant
    │  capture    the model on each number of rows
    ▼
the problem for each number of rows
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from parcompiler.capture.clean import simplify
from parcompiler.errors import InputError, ParcompilerError, shown
from parcompiler.graph import Graph
from parcompiler.mesh import Cluster, Mesh, whole
from parcompiler.meshes.batch_invariance import batch_dependence
from parcompiler.options import MOST_PASSES
from parcompiler.plan import STAYS
from parcompiler.problem import Problem, prepared
from parcompiler.symbolic.sizes import Unfit, batch_of, sample_at

GIVEN, AUTO = "given", "auto"
Wanted = str | tuple[int, ...]


def wanted_rows(value: object, mesh: Mesh | Cluster, costs: str, *, again: bool) -> Wanted:
    """The option `microbatch`: a word, or numbers of rows to be weighed besides the given one.

    `again` says that the model can be captured on other rows. Raises InputError for other values,
    and where nothing can be weighed.
    """
    wanted: Wanted = value if isinstance(value, str) else _counts(value)
    if wanted not in (GIVEN, AUTO) and (isinstance(wanted, str) or not wanted):
        message = (
            "microbatch must be 'given', 'auto' or numbers of rows, each from 1 to "
            f"{MOST_PASSES:,} ({shown(value)} given)"
        )
        raise InputError(message)
    if wanted == GIVEN:
        return wanted
    if isinstance(mesh, Mesh):
        message = (
            "microbatch is for a Cluster, whose meshes are weighed: with a Mesh a micro-batch is "
            "what inputs are"
        )
        raise InputError(message)
    if not again:
        message = "microbatch needs the model, which is captured again: compile that, not a Graph"
        raise InputError(message)
    if costs != "model":
        message = "microbatch needs costs='model': what is measured is of the rows that are given"
        raise InputError(message)
    return wanted


def _counts(value: object) -> tuple[int, ...]:
    """The listed numbers of rows, each once; none if one is no positive integer."""
    counts = [whole(item) for item in value] if isinstance(value, Sequence) else []
    positive = [count for count in counts if count is not None and 0 < count <= MOST_PASSES]
    return tuple(dict.fromkeys(positive)) if len(positive) == len(counts) else ()


@dataclass
class MicrobatchSizes:
    """The problem for micro-batches of each number of rows that is weighed.

    `problem` is that of the given micro-batch; its mesh is one device, its micro-batches those of
    all data ranks together. `captured` is its graph as captured. `graphs` are all captured graphs,
    by the number of rows.
    """

    problem: Problem
    captured: Graph
    wanted: Wanted = GIVEN
    graphs: dict[int | None, Graph] = field(default_factory=dict, init=False)
    _problems: dict[int | None, Problem] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        """Enter the given micro-batch, which is captured already."""
        self.graphs[self.given] = self.captured
        self._problems[self.given] = self.problem

    @cached_property
    def given(self) -> int | None:
        """The rows of the given micro-batch; None where its tensors have no common dimension."""
        try:
            return batch_of(self.problem.graph).now
        except Unfit:
            return None

    @cached_property
    def rows(self) -> tuple[int | None, ...]:
        """All numbers of rows that are weighed, the given one first. Raises InputError where the
        given micro-batch has no common dimension of rows."""
        if self.wanted == GIVEN:
            return (self.given,)
        if self.given is None:
            message = (
                f"microbatch={self.wanted!r} needs inputs with equally many rows (their first "
                "dimension), and those given differ"
            )
            raise InputError(message)
        if self.wanted == AUTO:
            powers = (2**n for n in range(self.total.bit_length()))
            return tuple(dict.fromkeys((self.given, *(n for n in powers if self.total % n == 0))))
        assert isinstance(self.wanted, tuple), "wanted_rows knows no other word"
        return tuple(dict.fromkeys((self.given, *sorted(self.wanted))))

    @property
    def total(self) -> int:
        """The rows of a step."""
        return self.problem.options.microbatches * (self.given or 1)

    def microbatches(self, rows: int | None) -> int:
        """The micro-batches of a step, of all data ranks together; 0 where rows remain."""
        if rows == self.given:
            return self.problem.options.microbatches
        count, rest = divmod(self.total, rows or 1)
        return 0 if rest else count

    def fault(self, rows: int | None) -> str | None:
        """Why there is no micro-batch of `rows` rows; None if there is one."""
        if rows == self.given:
            return None
        if not self.microbatches(rows):
            return f"{self.total} rows cannot be divided into micro-batches of {rows}"
        if self._fixed:
            return f"{STAYS}: {self._fixed}"
        try:
            self.at(rows)
        except ParcompilerError as error:
            return f"no micro-batch of {rows} rows: {first_line(error)}"
        return None

    def at(self, rows: int | None) -> Problem:
        """The problem for micro-batches of `rows` rows, on which the model is captured. Raises
        CaptureError where it refuses them."""
        if rows not in self._problems:
            options, mesh = self.problem.options, self.problem.mesh
            # a step looks up rows of tables in each of them
            options = replace(options, microbatches=self.microbatches(rows))
            graph = prepared(self._captured_at(rows), options, mesh, options.dtype)
            self._problems[rows] = self.problem.anew(graph=graph)
        return self._problems[rows]

    def _captured_at(self, rows: int | None) -> Graph:
        """The graph captured on `rows` rows."""
        if rows not in self.graphs:
            assert rows is not None, "the rows that are given are captured"
            assert self.captured.recapture is not None, "wanted_rows asks for the model"
            sample = sample_at(self.captured, (batch_of(self.problem.graph),), {"b": rows})
            self.graphs[rows] = self.captured.recapture(sample)
        return self.graphs[rows]

    @cached_property
    def _fixed(self) -> str | None:
        """Why there are no micro-batches of other rows, or why their step may have another loss."""
        rows = max(self.given or 0, 2)  # one row alone may be computed in another way than several
        try:
            graphs = (simplify(self._captured_at(x)) for x in (rows, 2 * rows))
            return batch_dependence(*graphs)
        except ParcompilerError as error:
            return first_line(error)


def first_line(error: Exception) -> str:
    """The first line of an error's message."""
    return str(error).splitlines()[0]
