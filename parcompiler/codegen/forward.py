"""The calls of a stage's forward: layers one after another, and loops over those that repeat."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence

from parcompiler.codegen.layers import StageLayers
from parcompiler.codegen.layout import wrap
from parcompiler.codegen.loops import Loop, sources
from parcompiler.lower.lowered import Call, StageProgram
from parcompiler.naming.source import spoken_name

ALWAYS = 1 << 30  # later than any call of a round
INDENT = 8


class Forward:
    """Writes the calls; a result has its name in the user's source if that is free.

    `taken` are the names of arguments and of the prologue.
    """

    def __init__(self, stage: StageProgram, layers: StageLayers, taken: Collection[str]) -> None:
        self._loops, self._paths = layers.loops, layers.paths
        self._variables = layers.variables(taken)
        self._results = [*stage.gives, *([stage.loss] if stage.loss else []), *stage.keeps]
        results = {name for call in stage.calls for name in call.results}
        self._taken = {*taken, *results, *self._variables.values()}
        self._last = {
            name: i
            for i, loop in enumerate(self._loops)
            for call in loop.calls
            for name in call.arguments
        } | dict.fromkeys(self._results, len(self._loops))
        self._names: dict[str, str] = {}

    def lines(self) -> Iterator[str]:
        """The calls in order, and the return statement."""
        for now, loop in enumerate(self._loops):
            yield from (
                self._single(loop.calls[0], now) if len(loop.rounds) == 1 else self._loop(loop, now)
            )
        yield wrap(f"return {', '.join(map(self._name, self._results)) or '()'}", INDENT)

    def _name(self, value: str) -> str:
        """The variable that holds a value."""
        return self._names.get(value, value)

    def _single(self, call: Call, now: int) -> Iterator[str]:
        """One call of one layer."""
        arguments = [self._name(name) for name in call.arguments]
        self._give([call], now)
        yield self._call(call, f"self.{self._paths[call.block.name]}", arguments, INDENT)

    def _loop(self, loop: Loop, now: int) -> Iterator[str]:
        """The lines of a loop: values are named after those of the last round."""
        last = loop.rounds[-1]
        before = [(last[p].results[r], self._name(name)) for p, r, name in loop.carried]
        self._give(last, now, loop)
        for value, text in before:
            if self._name(value) != text:
                yield wrap(f"{self._name(value)} = {text}", INDENT)
        yield wrap(self._header(loop), INDENT)
        arguments = iter(self._arguments(loop))
        for fresh, call in zip(loop.fresh, last, strict=True):
            path = self._paths[call.block.name]
            layer = self._variables[_list(path)] if fresh else f"self.{path}"
            texts = [next(arguments) for _ in call.arguments]
            yield self._call(call, layer, texts, INDENT + 4)

    def _arguments(self, loop: Loop) -> Iterator[str]:
        """The arguments of the calls of a round."""
        last = loop.rounds[-1]
        for _, place in sources(loop.rounds[1], loop.rounds[0]):
            if isinstance(place, str):
                yield self._name(place)
            else:
                p, r = place
                yield self._name(last[p].results[r])

    def _header(self, loop: Loop) -> str:
        """`for layer in self.h:`"""
        paths = [self._paths[call.block.name] for call in loop.rounds[0]]
        lists = [_list(path) for path, fresh in zip(paths, loop.fresh, strict=True) if fresh]
        if not lists:
            return f"for _ in range({len(loop.rounds)}):"
        each = ", ".join(self._variables[path] for path in lists)
        over = ", ".join(f"self.{path}" for path in lists)
        return f"for {each} in {over if len(lists) == 1 else f'zip({over}, strict=True)'}:"

    def _call(self, call: Call, layer: str, arguments: Sequence[str], indent: int) -> str:
        """`a, b = layer(x)`, or `a, b = runtime.recomputed(layer, x)`, or `offloaded`."""
        names = ", ".join(map(self._name, call.results))
        text = f"{layer}({', '.join(arguments)})"
        if call.recompute or call.offload:
            verb = "recomputed" if call.recompute else "offloaded"
            text = f"runtime.{verb}({', '.join([layer, *arguments])})"
        return wrap(f"{names} = {text}" if names else text, indent)

    def _give(self, calls: Sequence[Call], now: int, loop: Loop | None = None) -> None:
        """Name the results of a call, or of a round, of the loop `now`."""
        for call in calls:
            for node, value in zip(call.block.outputs, call.results, strict=True):
                wish = "loss" if value == "loss" else spoken_name(node)
                if wish is not None and self._is_free(wish, value, now):
                    self._names[value] = wish
        for value in self._clashing(calls, now, loop):
            self._names[value] = value

    def _is_free(self, wish: str, value: str, now: int) -> bool:
        """Whether no value that is read after the loop `now` is called `wish`."""
        return wish == value or (
            wish not in self._taken
            and not any(
                name == wish and self._last.get(other, -1) > now
                for other, name in self._names.items()
            )
        )

    def _clashing(self, calls: Sequence[Call], now: int, loop: Loop | None) -> set[str]:
        """The values of a round that cannot have the same name as another one there."""
        spans = _spans(calls, loop, {name for name, last in self._last.items() if last > now})
        clashing = set()
        for first, second in itertools.combinations(spans, 2):
            # A result may take the name of a value that its call is the last to read.
            pairs = itertools.product(spans[first], spans[second])
            overlap = any(a == c or (a < d and c < b) for (a, b), (c, d) in pairs)
            if overlap and self._name(first) == self._name(second):
                clashing |= {first, second}
        if loop is not None:
            reads = sources(loop.rounds[1], loop.rounds[0])
            fixed = {self._name(str(place)) for kind, place in reads if kind == "outside"}
            initial = {self._name(name) for _, _, name in loop.carried}
            fixed |= initial if len(loop.carried) > 1 else set()
            clashing |= {value for value in spans if self._name(value) in fixed}
        return clashing


def _spans(
    calls: Sequence[Call], loop: Loop | None, read_later: Collection[str]
) -> dict[str, list[tuple[int, int]]]:
    """When the values of a round are live: from the call that makes them to the last reader."""
    place = {name: p for p, call in enumerate(calls) for name in call.results}
    spans: dict[str, list[tuple[int, int]]] = {}
    for name, p in place.items():
        readers = [q for q, call in enumerate(calls) if name in call.arguments]
        end = ALWAYS if name in read_later else max(readers, default=p)
        spans[name] = [(p, end)]
    if loop is not None:
        reads = sources(loop.rounds[1], loop.rounds[0])
        readers = [q for q, call in enumerate(calls) for _ in call.arguments]
        for p, r, _ in loop.carried:
            ends = [q for q, read in zip(readers, reads, strict=True) if read == ("before", (p, r))]
            spans[calls[p].results[r]] = [(-1, max(ends)), (p, ALWAYS)]
    return spans


def _list(path: str) -> str:
    """The list that a layer is in: `h` of `h[0]`."""
    return path.rpartition("[")[0]
