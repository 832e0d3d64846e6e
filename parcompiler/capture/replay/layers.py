"""Which layers of a model are traced while it is, and which have copies of what others were."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import fx, nn

from parcompiler.capture.replay.alike import Attribute, differences, is_same
from parcompiler.capture.replay.calls import Call, call_of
from parcompiler.capture.replay.span import Span, equal, is_copyable
from parcompiler.capture.replay.tracing import Sources, Tracing, aside, now
from parcompiler.capture.replay.watch import Surroundings, reads

LEAST = 5  # layers that are alike, for fewer of which nothing is gained
_MOST = 8  # kinds of layers in a list, and of calls of a kind, that are looked at

Follows = Callable[[Any], bool]
Model = TypeVar("Model", bound=nn.Module)


class Differs(Exception):
    """A layer was traced to other nodes than one that it is equal to."""


@dataclass
class Record:
    """What a call was traced to: so are those of layers in which what it `read` is the same.

    `calls` is how often each module inside was called; `confirmed`: a second layer was equal.
    """

    call: Call
    span: Span
    read: dict[Attribute, Any]
    calls: dict[str, int]
    confirmed: bool = False

    def fits(self, layer: nn.Module, call: Call, graph: fx.Graph) -> bool:
        """Whether a call of another layer is to be traced to equal nodes."""
        return (
            self.span.nodes[0].graph is graph
            and self.call.key == call.key
            and all(is_same(value, attribute(layer, at)) for at, value in self.read.items())
        )


@dataclass
class Kind:
    """Layers of a list that are alike but for the values of attributes, and what was traced."""

    layers: list[nn.Module]
    differing: set[Attribute] = field(default_factory=set)
    records: list[Record] = field(default_factory=list)
    refused: bool = False


class Replay:
    """What is known of the layers of a model; `used`: some have copies.

    `follows` tells of a tensor whether anything is known of its values.
    """

    def __init__(self, model: nn.Module, follows: Follows) -> None:
        self.used = False
        self._follows = follows
        self._busy = False
        self._layers: dict[int, tuple[nn.Module, Kind]] = {}
        for kind in (kind for module in model.modules() for kind in kinds(module)):
            for layer in kind.layers:  # the tracer's stand-ins for a module have its __dict__
                self._layers.setdefault(id(vars(layer)), (layer, kind))

    def call(self, module: nn.Module, trace: Callable[[], Any], args: Any, kwargs: Any) -> Any:
        """What a module returns: its nodes are copies of those of an equal one, or `trace`d."""
        found = None if self._busy else self._layers.get(id(vars(module)))
        if found is None or found[1].refused:
            return trace()
        layer, kind = found
        tracing = now(layer)
        if tracing is None:
            return trace()
        record: Record | None = None
        with aside():
            call = self._call(tracing, args, kwargs)
            sources = None if call is None else tracing.sources(call)
            if call is not None and sources is not None:
                record = next((r for r in kind.records if r.fits(layer, call, tracing.graph)), None)
                if record is not None and record.confirmed and layer is not kind.layers[-1]:
                    self.used = True
                    return tracing.copy(record.span, call, record.calls)
        if call is None or sources is None:
            kind.refused = True
            return trace()
        return self._traced(kind, tracing, call, sources, record, trace)

    def _call(self, tracing: Tracing, args: Any, kwargs: Any) -> Call | None:
        """The call with these arguments."""
        return call_of(args, kwargs, lambda t: self._follows(t) or tracing.has_constant(t))

    def _traced(
        self,
        kind: Kind,
        tracing: Tracing,
        call: Call,
        sources: Sources,
        record: Record | None,
        trace: Callable[[], Any],
    ) -> Any:
        """Trace a layer, and keep what it was traced to, or compare that with `record`."""
        surroundings, start = Surroundings(tracing.layer), next(reversed(tracing.graph.nodes))
        self._busy = True
        try:
            with reads(tracing.layer, kind.differing) as read:
                result = trace()
        finally:
            self._busy = False
        with aside():
            span = tracing.span(start, call, sources, result)
            if span is None or not self._is_clear(span) or not surroundings.unchanged():
                self._refuse(kind, record)
            elif record is None and len(kind.records) < _MOST:
                values = {at: attribute(tracing.layer, at) for at in read}
                kind.records.append(Record(call, span, values, tracing.calls))
            elif record is None or not equal(record.span, span):
                self._refuse(kind, record)
            else:
                record.confirmed = True
        return result

    def _is_clear(self, span: Span) -> bool:
        """Whether nodes depend on what is known to be equal, and nothing is known of results."""
        return is_copyable(span) and not any(map(self._follows, span.made))

    def _refuse(self, kind: Kind, record: Record | None) -> None:
        """Copy no layers of a kind; where some may have been already, trace all anew."""
        kind.refused = True
        if record is not None and record.confirmed and self.used:
            raise Differs


@contextmanager
def replaying(replay: Replay, model: Model) -> Iterator[Model]:
    """Within it, the equal layers of `model` have copies of what two of them are traced to."""
    original: Callable[..., Any] = nn.Module._call_impl

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return replay.call(self, lambda: original(self, *args, **kwargs), args, kwargs)

    nn.Module._call_impl = call  # type: ignore[method-assign]
    try:
        yield model
    finally:
        nn.Module._call_impl = original  # type: ignore[method-assign]


def kinds(module: nn.Module) -> list[Kind]:
    """The numbered members of a module, those that are alike together."""
    members = [child for name, child in module.named_children() if name.isdigit()]
    found: list[Kind] = []
    for member in members if len(members) >= LEAST else ():
        for kind in found:
            differing = differences(kind.layers[0], member)
            if differing is not None:
                kind.layers.append(member)
                kind.differing |= differing
                break
        else:
            found.append(Kind([member]))
        if len(found) > _MOST:
            return []
    return [kind for kind in found if len(kind.layers) >= LEAST]


def attribute(layer: nn.Module, at: Attribute) -> Any:
    """The value of an attribute of a module inside a layer."""
    path, name = at
    return vars(layer.get_submodule(path))[name]
