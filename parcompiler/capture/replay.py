"""Copies the nodes of equal layers instead of tracing each, while `torch.export` traces a model.

`torch.export` traces the layers of a list one by one, which takes most of its time. Here the first
two and the last of those that are equal are traced; where the three have equal nodes, the layers
between have copies of them. Equal layers have the same classes, shapes, ties and attributes (apart
from those that their forward does not read) and are called with equal arguments. A layer whose
forward has side effects is traced; if the last layer turns out to differ, the model is traced anew.

    layers.0   traced                   ─┐
    layers.1   traced, equal to it       │ the same graph as without copies, node for node
    layers.2 … layers.124   copied       │
    layers.125 traced, equal to it      ─┘

Assumes that a forward does not depend on hidden state of the process (a file, the clock) that
differs for some of the copied layers and for none of the traced ones.

`LayerCopies` is the interface; with `ENABLED = False` every layer is traced.
"""

from __future__ import annotations

import operator
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import nn

from parcompiler.capture.known import is_fixed
from parcompiler.capture.layer_tracer import (
    LayerTrace,
    current_tracer,
    form,
    untraced,
)
from parcompiler.capture.patches import patched
from parcompiler.capture.untouched import Attribute, is_plain, reads

ENABLED = True
FEWEST = 5  # equal layers; copying fewer saves nothing
_MOST = 8  # traces of equal layers that read different values; with more, every layer is traced


class LayersDiffer(Exception):
    """The trace of the last layer differs from the copied nodes."""


@dataclass
class EqualLayers:
    """Layers of a list that differ only in values of tensors and plain attributes."""

    layers: list[nn.Module]
    traces: list[LayerTrace] = field(default_factory=list)
    refused: bool = False


class LayerCopies:
    """Traces some layers of a model and copies the others; `used` says whether any was copied.

    `has_values` says whether anything is known of a tensor's values.
    """

    def __init__(self, model: nn.Module, has_values: Callable[[torch.Tensor], bool]) -> None:
        self.used = False
        self._has_values = has_values
        self._inside = False  # a layer whose own layers are traced
        self._groups: dict[int, tuple[nn.Module, EqualLayers]] = {}
        for group in equal_layers(model) if ENABLED else ():
            for layer in group.layers:  # the tracer's proxies share a module's __dict__
                self._groups.setdefault(id(vars(layer)), (layer, group))

    def applied(self) -> AbstractContextManager[None]:
        """In this context, layers that are called may be copied instead of being traced."""
        original: Callable[..., Any] = nn.Module._call_impl
        copies = self

        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return copies._call(self, lambda: original(self, *args, **kwargs), args, kwargs)

        return patched(nn.Module, _call_impl=call)

    def _call(self, module: nn.Module, trace: Callable[[], Any], args: Any, kwargs: Any) -> Any:
        """Call a module by copying or tracing its nodes. Returns its result."""
        entry = None if self._inside else self._groups.get(id(vars(module)))
        tracer = None if entry is None or entry[1].refused else current_tracer(entry[0])
        if entry is None or tracer is None:
            return trace()
        layer, group = entry
        known: LayerTrace | None = None
        with untraced():
            call = tracer.call(args, kwargs, describe(layer), self._has_values)
            if call is not None:
                equal = (t for t in group.traces if t.graph is tracer.graph and t.key == call.key)
                known = next((t for t in equal if t.read.items() <= call.plain.items()), None)
                if known is not None and known.confirmed and layer is not group.layers[-1]:
                    self.used = True
                    return tracer.copy(known, call)
        if call is None:
            group.refused = True
            return trace()
        (values, state), start = _surroundings(layer), len(tracer.graph.nodes)
        self._inside = True
        try:
            with reads(layer, call.plain) as read:
                result = trace()
        finally:
            self._inside = False
        with untraced():
            traced = tracer.traced(call, read, start, result)
            later, later_state = _surroundings(layer)
            same = len(values) == len(later) and all(map(operator.is_, values, later))
            changed = not same or state != later_state
            if traced and (changed or any(map(self._has_values, traced.made))):
                traced = None
            if traced is not None and known is None and len(group.traces) < _MOST:
                group.traces.append(traced)
            elif traced is not None and known and traced.signature == known.signature:
                known.confirmed = True
            else:
                group.refused = True
                if self.used and known is not None and known.confirmed:
                    raise LayersDiffer
        return result


def equal_layers(model: nn.Module) -> Iterator[EqualLayers]:
    """The groups of numbered members of modules (`layers.0`, `layers.1`) that are equal."""
    for parent in model.modules():
        numbered = [child for name, child in parent.named_children() if name.isdigit()]
        groups: dict[Hashable, list[nn.Module]] = defaultdict(list)
        for layer in numbered if len(numbered) >= FEWEST else ():
            groups[describe(layer)[0]].append(layer)
        for layers in groups.values():
            modules = [id(module) for layer in layers for module in layer.modules()]
            if len(layers) >= FEWEST and len(set(modules)) == len(modules):  # no shared modules
                yield EqualLayers(layers)


def describe(layer: nn.Module) -> tuple[Hashable, dict[Attribute, Hashable]]:
    """A key that equal layers share, and the values of plain attributes, which may differ.

    >>> one, other = nn.Identity(), nn.Identity()
    >>> one.place, other.place = 0, 1
    >>> describe(one)[0] == describe(other)[0], describe(one)[1] == describe(other)[1]
    (True, False)
    >>> describe(nn.Linear(2, 3))[0] == describe(nn.Linear(2, 4))[0]
    False
    """
    numbers: dict[int, int] = {}  # of tensors and modules: ties are part of the structure
    parts: list[Hashable] = []
    plain: dict[Attribute, Hashable] = {}

    def number(item: object) -> int:
        return numbers.setdefault(id(item), len(numbers))

    for path, module in layer.named_modules(remove_duplicate=False):
        parts.append((path, type(module), number(module)))
        for name, value in vars(module).items():
            key: Hashable
            if name in ("_parameters", "_buffers") and isinstance(value, dict):
                key = tuple(
                    (n, t if t is None else (form(t), number(t)), _decisive(module, n, t))
                    for n, t in value.items()
                )
            elif name == "_modules" and isinstance(value, dict):
                key = tuple((n, m is None) for n, m in value.items())
            elif "_hooks" in name:  # hooks of saving and loading do not run in a forward
                key = id(value) if value and "state_dict" not in name else None
            else:
                key, is_constant = _key(value)
                if is_constant:
                    plain[path, name], key = key, None
            parts.append((name, key))
    return tuple(parts), plain


def _decisive(module: nn.Module, name: str, tensor: torch.Tensor | None) -> Hashable:
    """The values of a buffer if a forward may branch on them; else None."""
    if tensor is None or type(tensor) is not torch.Tensor or not is_fixed(module, name, tensor):
        return None
    return tensor.cpu().numpy().tobytes()


def _key(value: Any) -> tuple[Hashable, bool]:
    """A key that equal values share, and whether it is free of object identities."""
    if is_plain(value):
        return (type(value), repr(value)), True
    items: Any
    if type(value) in (list, tuple):
        items = value
    elif type(value) in (set, frozenset):
        items = sorted(value, key=repr)
    elif type(value) is dict:
        items = [part for item in value.items() for part in item]
    elif type(value) is partial:
        items = value.func, value.args, value.keywords
    else:
        return id(value), False
    keys = [_key(item) for item in items]
    return (type(value), *(key for key, _ in keys)), all(constant for _, constant in keys)


def _surroundings(layer: nn.Module) -> tuple[list[Any], Hashable]:
    """Things that a forward may change: objects in attributes and in variables of the files of its
    classes, and the random states of Python and numpy.

    The list keeps the objects alive, so that a new one is never taken for an old one.
    """
    owners = [vars(module) for module in layer.modules()]
    files = {type(module).__module__ for module in layer.modules()}
    owners += [vars(sys.modules[name]) for name in sorted(files) if name in sys.modules]
    values = [value for owner in owners for value in (*owner, *owner.values())]
    for value in list(values):
        if type(value) in (list, tuple, set, frozenset):
            values += value
        elif isinstance(value, dict):
            values += [*value, *value.values()]
        elif hasattr(value, "__dict__") and not isinstance(value, type | nn.Module | ModuleType):
            values += vars(value).values()
    numpy = sys.modules.get("numpy")
    drawn = repr(numpy.random.get_state(legacy=False)) if numpy else ""
    return values, (random.getstate(), drawn)
