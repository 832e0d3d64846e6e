"""Runs a model and restores it afterwards, and finds attributes that its forwards change.

A captured graph computes every micro-batch like the first one. A forward that reads state that an
earlier one left in an attribute (a counter, a growing list, its last output) computes something
else each time, and is refused. Attributes that a forward only writes (attention maps for
inspection), writes before it reads, or makes once and then keeps (tables of positions) do no harm.

>>> model = nn.Linear(1, 1)
>>> model.seen = []
>>> weight = model.weight.detach().clone()
>>> with untouched(model, lambda tensor: torch.float64):
...     model.seen.append(model.weight.dtype)
...     _ = model.weight.data.zero_()
>>> model.seen, model.weight.dtype, bool(model.weight == weight)
([], torch.float32, True)
"""

from __future__ import annotations

import ast
import enum
import linecache
import sys
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import lru_cache, partial, wraps
from itertools import islice
from operator import length_hint
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from parcompiler.capture.loss import PREFIX, WithLoss
from parcompiler.capture.patches import TORCH, patched
from parcompiler.errors import CaptureError

Attribute = tuple[str, str]  # the path of a module or object, and a name in its __dict__
OUTSIDE = " outside"  # in place of a path: names in the model's code from outside of it
Position = tuple[int, int]  # line and column of code
Places = dict[Attribute, set[tuple[str, Position]]]  # positions with their file

_PLAIN = (
    bool, int, float, complex, str, bytes, range, slice, type(None), torch.dtype, torch.device,
    torch.Size, torch.layout, torch.memory_format, enum.Enum,
)  # fmt: skip
_MOST = 1000  # items of a container that is compared
_REGISTERED = ("_parameters", "_buffers", "_modules")
_OF_TORCH = frozenset(vars(nn.Module())) - {"training", *_REGISTERED}  # hooks and the like
_OPAQUE = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, nn.Module)
_CONTAINERS = (dict, list, set, deque, tuple, frozenset)
_WRITTEN_IN_PYTHON = 1 << 9  # Py_TPFLAGS_HEAPTYPE, in the flags of a class


class Attributes:
    """A snapshot of the attributes of all modules of a model, and of their contents."""

    def __init__(self, model: nn.Module) -> None:
        self._containers: list[tuple[Any, Any]] = []  # each with a copy
        owners = list(_owners(model))
        # Kept alive, so that no other object gets the same id.
        self._seen: dict[int, object] = {id(owner): owner for _, owner in owners}
        self._forms = {
            (path, name): self._form(value)
            for path, owner in owners
            for name, value in self._attributes(owner)
        }
        self._model, self._holders = model, _outside(model)
        for label, (_, _, value) in self._holders.items():
            self._forms[OUTSIDE, label] = self._shallow(value)

    def changed(self, later: Attributes) -> set[Attribute]:
        """Module path and name of attributes that differ in `later`."""
        names = self._forms.keys() | later._forms.keys()
        return {at for at in names if self._forms.get(at) != later._forms.get(at)}

    def restore(self) -> None:
        """Restore the contents of modules and containers."""
        for container, copy in self._containers:
            if _members(container) != _members(copy):  # unchanged ones may be read-only
                container.clear()
                (container.extend if isinstance(copy, list | deque) else container.update)(copy)
        now = _outside(self._model)
        for label, (put, name, value) in self._holders.items():
            if label not in now or now[label][2] is not value:
                put(name, value)

    def _shallow(self, value: Any) -> Hashable:
        """A key of a value outside of the model, without looking into objects."""
        if is_plain(value):
            return type(value), repr(value)
        self._containers.append((value, value.copy()))
        items = [*value, *value.values()] if isinstance(value, dict) else list(value)
        return (
            id(value),
            tuple(repr(x) if is_plain(x) else id(x) for x in items[:_MOST]),
            len(items),
        )

    def _attributes(self, owner: object) -> Iterator[tuple[str, object]]:
        """The attributes of a module, with the tensors and modules that it registered, or of an
        object."""
        attributes = vars(owner)
        self._containers.append((attributes, dict(attributes)))
        for name, value in attributes.items():
            if not isinstance(owner, nn.Module):
                yield name, value
            elif name in _REGISTERED:
                self._containers.append((value, dict(value)))
                yield from value.items()
            elif name not in _OF_TORCH:
                yield name, value
            elif isinstance(value, dict | set):  # transformers adds hooks in the first forward
                self._containers.append((value, value.copy()))

    def _form(self, value: Any) -> Hashable:
        """A key, equal for attributes that a forward cannot tell apart: numbers by value, tensors
        by identity."""
        if is_plain(value):
            return type(value), repr(value)
        known = id(value) in self._seen
        self._seen[id(value)] = value
        if known or isinstance(value, (torch.Tensor, *_OPAQUE)):
            return id(value)
        if isinstance(value, Iterator):  # a count tells its position, others what is left
            return id(value), repr(value), length_hint(value, -1)
        items = self._items(value)
        if items is None or len(items) > _MOST:
            return id(value), None if items is None else len(items)
        return type(value), *map(self._form, items)

    def _items(self, value: Any) -> list[Any] | None:
        """The contents of a container or an object; None if it can hold nothing."""
        if isinstance(value, tuple):  # list() asks for its len(), which a subclass may forbid
            return list(tuple.__iter__(value))
        if isinstance(value, frozenset):
            return list(value)
        if not isinstance(value, dict | list | set | deque):
            value = getattr(value, "__dict__", None)
        if not isinstance(value, dict | list | set | deque):
            return None
        self._containers.append(
            (value, list(value) if isinstance(value, list | deque) else value.copy())
        )
        if isinstance(value, dict):
            return [*value, *value.values()]
        return sorted(value, key=id) if isinstance(value, set) else list(value)


def _owners(model: nn.Module) -> Iterator[tuple[str, object]]:
    """Modules, and objects of the user's classes in their attributes (helpers, configurations),
    recursively; each with its path."""
    owners: list[tuple[str, object]] = [*model.named_modules()]
    seen = {id(owner) for _, owner in owners}
    for path, owner in owners:  # grows
        yield path, owner
        for name, value in vars(owner).items():
            if id(value) not in seen and _is_object(value):
                seen.add(id(value))
                owners.append((f"{path}.{name}".lstrip("."), value))


def _is_object(value: object) -> bool:
    """Whether a value is of a class whose reads and writes of attributes can be followed."""
    kind = type(value)
    return (
        bool(kind.__flags__ & _WRITTEN_IN_PYTHON)
        and hasattr(value, "__dict__")
        and kind.__module__.partition(".")[0] != "torch"
        and not isinstance(value, (torch.Tensor, Iterator, *_CONTAINERS, *_OPAQUE, *_PLAIN))
    )


def _members(container: Any) -> list[int] | set[int]:
    """The identities of a container's items, in order."""
    if isinstance(container, dict):
        return [id(x) for pair in container.items() for x in pair]
    ids = map(id, container)
    return set(ids) if isinstance(container, set) else list(ids)


def _outside(model: nn.Module) -> dict[str, tuple[Callable[[str, Any], None], str, Any]]:
    """Numbers and containers outside of a model that the code of its classes names: attributes of
    classes, globals and closure variables. Each with a function that sets it."""
    attributes: dict[str, tuple[Callable[[str, Any], None], str, Any]] = {}
    kinds = dict.fromkeys(kind for module in model.modules() for kind in type(module).__mro__)
    functions = list[FunctionType]()
    for kind in kinds:
        if kind.__module__.partition(".")[0] in ("torch", "builtins", "parcompiler"):
            continue
        for name, value in vars(kind).items():
            if isinstance(value, FunctionType):
                functions.append(value)
            elif _may_count(value) and not name.startswith("__"):
                attributes[f"{kind.__qualname__}.{name}"] = partial(setattr, kind), name, value
    seen = set[int]()
    for function in functions:  # grows by functions of the same file that are named
        code, names = function.__code__, function.__globals__
        if id(code) in seen:
            continue
        seen.add(id(code))
        for name in code.co_names:
            value = names.get(name)
            if isinstance(value, FunctionType) and value.__globals__ is names:
                functions.append(value)
            elif name in names and _may_count(value):
                attributes[f"the global {name}"] = names.__setitem__, name, value
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            with suppress(ValueError):  # a cell that is still empty
                if _may_count(cell.cell_contents):
                    put = partial(_fill, cell)
                    attributes[f"{name} of {function.__qualname__}"] = put, name, cell.cell_contents
    return attributes


def _may_count(value: object) -> bool:
    """Whether a forward may keep its state in a value outside of the model."""
    return type(value) in (int, float, bool, str, type(None), list, dict, set, deque)


def _fill(cell: Any, name: str, value: object) -> None:
    """Set a closure variable."""
    cell.cell_contents = value


@contextmanager
def untouched(
    model: nn.Module, dtype: Callable[[torch.Tensor], torch.dtype] = lambda tensor: tensor.dtype
) -> Iterator[None]:
    """In this context, a model has no gradients, and its parameters, buffers and tensors in
    attributes have copied values, each in its `dtype`; it may be run and trained. Afterwards
    everything is restored: these tensors with their hooks, values and gradients, attributes, and
    random states.
    """
    attributes = Attributes(model)
    plain = [x for m in model.modules() for x in vars(m).values() if type(x) is torch.Tensor]
    constants = [tensor for tensor in plain if tensor.grad_fn is None]
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers(), *constants)}.values()
    kept = [(tensor, tensor.data, tensor.grad, tensor.requires_grad) for tensor in tensors]
    with torch.random.fork_rng(devices=[]):
        try:
            for tensor, data, _, _ in kept:
                tensor.grad = None
                tensor.data = data.to(dtype(tensor), copy=True)
            yield
        finally:
            attributes.restore()
            for tensor, data, gradient, trained in kept:
                if tensor.grad_fn is not None:  # updated in place with a gradient
                    tensor.detach_()
                tensor.grad = None
                tensor.data = data
                tensor.requires_grad_(trained).grad = gradient


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """In this context, a model may change its attributes; afterwards they are restored."""
    attributes = Attributes(model)
    try:
        yield
    finally:
        attributes.restore()


@contextmanager
def watched(
    model: nn.Module,
    around: Callable[[], AbstractContextManager[None]],
    changed: set[Attribute],
) -> Iterator[None]:
    """In this context, and within `around`, a forward runs: adds to `changed` the attributes that
    it changes."""
    before = Attributes(model)
    try:
        with around():
            yield
    finally:
        changed |= before.changed(Attributes(model))


def check_attributes(whole: WithLoss, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse a model whose second forward reads attributes that the first one has changed, and
    changes them again; warn of repeated changes outside of the model. Everything is restored.

    Raises CaptureError with the names of the attributes.
    """
    first = Attributes(whole)
    with untouched(whole), torch.enable_grad():
        whole(*args, **kwargs)
        second = Attributes(whole)
        changed = first.changed(second)
        args, kwargs = pytree.tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
        with reads(whole, changed) as read:
            whole(*args, **kwargs)
        again = second.changed(Attributes(whole)) & changed
        refused = again & read
    if counted := sorted(label for path, label in again if path is OUTSIDE):
        message = (
            f"parcompiler: each forward changes {', '.join(counted)}, outside of the model: if "
            "forwards read it, every micro-batch is computed as the first one (register such state "
            "as a buffer and update that in place, or pass it as an input)"
        )
        print(message, file=sys.stderr)
    if refused:
        names = sorted(".".join(filter(None, at)).removeprefix(PREFIX) for at in refused)
        message = (
            f"the forward reads attributes that earlier forwards have changed ({', '.join(names)})"
            ": every micro-batch would be computed as the first one. Register such state as a "
            "buffer (a tensor) and update that in place, or pass it as an input"
        )
        raise CaptureError(message)


def is_plain(value: object) -> bool:
    """Whether a value is immutable and identified by its `repr`."""
    return isinstance(value, _PLAIN)


@contextmanager
def reads(model: nn.Module, watched: Collection[Attribute]) -> Iterator[set[Attribute]]:
    """In this context, code runs; afterwards the set has the attributes of `watched` that it read.

    Code outside of torch that takes the `__dict__` of an owner reads all its attributes. Attributes
    that it wrote before do not count, nor numbers that are read only by statements that assign them
    (a counter that is never used).
    """
    attributes: set[Attribute] = set()
    read: Places = {}
    written: Places = {}
    paths, names = {path for path, _ in watched}, {name for _, name in watched}
    owners = [(path, owner) for path, owner in _owners(model) if path in paths]
    places = {id(vars(owner)): path for path, owner in owners}
    kinds = {type(owner) for _, owner in owners}

    def place(owner: object) -> str | None:
        return places.get(id(object.__getattribute__(owner, "__dict__")))

    def reading(original: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
        def get(self: object, name: str) -> Any:
            path = place(self) if name == "__dict__" or name in names else None
            if path is not None and name != "__dict__":
                if (path, name) in read or (path, name) not in written:
                    read.setdefault((path, name), set()).add(_place())
            elif path is not None and not sys._getframe(1).f_code.co_filename.startswith(TORCH):
                attributes.update(at for at in watched if at[0] == path)
            return original(self, name)

        return get

    def writing(original: Callable[..., None]) -> Callable[..., None]:
        @wraps(original)  # torch looks whether a `register_buffer` takes `persistent`
        def put(self: object, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            path = place(self)
            if path is not None:
                places_of = written.setdefault((path, name), set())
                if isinstance(value, int | float):
                    places_of.add(_place())
            original(self, name, value, *args, **kwargs)

        return put

    methods = {"__getattribute__": reading, "__setattr__": writing, "register_buffer": writing}
    try:
        with ExitStack() as stack:
            for kind in kinds:  # patches a class, so all instances
                known = {name: change for name, change in methods.items() if hasattr(kind, name)}
                changed = {name: change(getattr(kind, name)) for name, change in known.items()}
                stack.enter_context(patched(kind, **changed))
            yield attributes
    finally:
        read_at = (
            at for at, names_read in read.items() if not names_read <= written.get(at, set())
        )
        attributes.update(at for at in read_at if at in watched)


def _place() -> tuple[str, Position]:
    """Where code reads or writes an attribute: the beginning of a statement that only assigns
    attributes, else the expression itself. Without source, the line."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((__file__, TORCH)):
        frame = frame.f_back
    file = frame.f_code.co_filename
    line, _, column, _ = next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None))
    assignments = _assignments("".join(linecache.getlines(file, frame.f_globals)))
    if assignments is None or line is None or column is None:
        return file, (frame.f_lineno, 0)
    around = (begin for begin, end in assignments if begin <= (line, column) < end)
    return file, next(around, (line, column))


@lru_cache(maxsize=64)
def _assignments(source: str) -> tuple[tuple[Position, Position], ...] | None:
    """Start and end of statements that only assign attributes; None without source.

    >>> _assignments("self.n += 1; x = self.n")
    (((1, 0), (1, 11)),)
    """
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except SyntaxError:
        return None
    return (
        tuple(
            ((x.lineno, x.col_offset), (x.end_lineno or x.lineno, x.end_col_offset or 0))
            for x in nodes
            if isinstance(x, ast.stmt) and _only_assigns(x)
        )
        if source
        else None
    )


def _only_assigns(statement: ast.stmt) -> bool:
    """Whether a statement assigns to attributes only."""
    if isinstance(statement, ast.Expr) and isinstance(call := statement.value, ast.Call):
        return isinstance(call.func, ast.Name) and call.func.id == "setattr"
    targets = getattr(statement, "targets", [getattr(statement, "target", None)])
    leaves = [x for t in targets for x in (t.elts if isinstance(t, ast.Tuple) else [t])]
    is_assignment = isinstance(statement, ast.Assign | ast.AugAssign | ast.AnnAssign)
    return is_assignment and all(isinstance(leaf, ast.Attribute) for leaf in leaves)
