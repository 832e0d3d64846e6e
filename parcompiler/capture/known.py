"""Answers to questions that a forward asks of tensor values while it is traced.

A traced tensor has no values, so `if tensor:` cannot be followed in general. Some kinds can:

    if mask.any():                 the tensor was computed from constants alone, so its value is
                                   the same for every batch
    x.split(sizes.tolist())        likewise lists and numbers, and sizes of results that
                                   depend on values (`nonzero`, `repeat_interleave`)
    if torch.rand([]) < 0.0:       no draw is below zero (layers dropped with no probability)
    if x.isinf().any():            values are taken to be finite
    assert (ids >= 0).all()        an assertion is taken to hold, and a check that would only raise
    if labels.max() >= n: raise    or warn is taken not to do so

Everything else is left to `torch.export`, which refuses questions that depend on the batch.

That a truth value only decides whether to raise or warn is recognised from the caller's frame.

>>> statement = ast.parse("if not ok.all(): raise ValueError").body[0]
>>> isinstance(statement, ast.If) and _harmless(statement.body)
True
"""

from __future__ import annotations

import ast
import itertools
import linecache
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from parcompiler.capture.loss import PREFIX
from parcompiler.capture.patches import ModelMode
from parcompiler.errors import CaptureError

LARGEST = 1 << 20  # elements of a tensor whose values are followed

_QUESTIONS: dict[Any, Callable[[torch.Tensor], Any]] = {
    torch.Tensor.__bool__: bool,
    torch.Tensor.__int__: int,
    torch.Tensor.__index__: int,
    torch.Tensor.__float__: float,
    torch.Tensor.item: torch.Tensor.item,
    torch.Tensor.tolist: torch.Tensor.tolist,
}
_YES_OR_NO = (torch.Tensor.__bool__, torch.Tensor.item)
_FACTORIES = frozenset("zeros ones full arange tensor eye linspace scalar_tensor".split())
_LIKE = frozenset("zeros_like ones_like full_like new_zeros new_ones new_full".split())
_SIZED = frozenset("view reshape expand repeat tile unflatten split narrow pad".split())
_LOOP = (
    "cannot capture a loop whose length depends on the values of tensors (over the experts that "
    "got tokens): loop over all experts (for expert in range(num_experts)), or take a mixture "
    "without such a loop (experts_implementation='grouped_mm' in the configuration, where "
    "transformers has it)"
)
_FINITE = {"isfinite": True, "isinf": False, "isnan": False}


class Known(ModelMode):
    """Follows the values of tensors that are computed from constants, beside the traced tensors.

    A model's integer tensors outside of state dicts (attributes, non-persistent buffers) are
    constants if no forward writes to them, which only the finished graph tells: `has_read_fixed`
    says whether they were used, and with `reads_fixed=False` none are.
    """

    def __init__(self, *, reads_fixed: bool = True) -> None:
        super().__init__()
        self.has_read_fixed = False
        self.may_read_fixed = reads_fixed
        self._reads_fixed = False  # before a model is traced
        self._buffers: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        self._saved: list[tuple[dict[str, Any], str, str]] = []
        self._values: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._spoiled: set[int] = set()
        self._draws: dict[int, torch.Tensor] = {}
        self._homes: dict[int, tuple[dict[str, Any], str]] = {}

    def traces(self, model: nn.Module) -> None:
        """Set the model that is traced: its tensors have stand-ins, which are also used by code
        that refers to the original model (a `forward` that closes over it)."""
        self._homes = {
            id(tensor): (home, name)
            for module in model.modules()
            for home in (module._parameters, module._buffers)
            for name, tensor in home.items()
        }
        buffers = [
            (module, name, buffer)
            for module in model.modules()
            for name, buffer in module._buffers.items()
        ]
        saved = {id(b) for module, name, b in buffers if not is_fixed(module, name, b)}
        self._buffers = [
            (module._buffers, name, buffer)
            for module, name, buffer in buffers
            if buffer is not None and id(buffer) not in saved
        ]
        self._saved = [
            (module._buffers, name, f"{path}.{name}".removeprefix(PREFIX))
            for path, module in model.named_modules()
            for name, buffer in module._buffers.items()
            if id(buffer) in saved and _is_of_integers(buffer)
        ]
        self._reads_fixed = self.may_read_fixed

    def _stand_in(self, value: Any) -> Any:
        """The stand-in of a tensor of the model, alone or in a list, during the trace."""
        if type(value) in (list, tuple):
            return type(value)(map(self._stand_in, value))
        home, name = self._homes.get(id(value), (None, ""))
        return value if home is None else home.get(name, value)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer a question if the answer is known; else run `func` and follow its result."""
        kwargs = {name: self._stand_in(value) for name, value in (kwargs or {}).items()}
        args = tuple(map(self._stand_in, args))
        if func in _QUESTIONS:
            value = self._value(args[0])
            if value is not None:
                with _eager():
                    return _QUESTIONS[func](value)
            if func in _YES_OR_NO and args[0].dtype == torch.bool:
                answer = assumed()
                if answer is not None:
                    return answer
            if func == torch.Tensor.__bool__:
                self._check_saved(args[0])
        iterate: Any = torch.Tensor.__iter__
        if func is iterate:
            return iter(self._followed(torch.unbind, args, {}, list(func(*args))))
        name = getattr(func, "__name__", "")
        args, kwargs = self._with_numbers(name, args, kwargs)
        if name == "unbind" and _without_numbers(args[0]):  # so a loop begins
            raise CaptureError(_LOOP)
        result = func(*args, **kwargs)
        _check_registered(func, args, result)
        if self._assume(name, args, result):
            return result
        return self._followed(func, args, kwargs, result)

    def _with_numbers(self, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments of a function with numbers in place of known tensors, where these are sizes
        or bounds: a trace would make an unknown size of each."""

        def number(size: Any) -> Any:
            value = self._value(size)
            if value is None or value.dim():
                return size
            with _eager():
                return value.item()

        def bounds(index: Any) -> Any:
            if isinstance(index, slice):
                return slice(*map(number, (index.start, index.stop, index.step)))
            return index

        if name in _SIZED:
            args = (*args[:1], *pytree.tree_map(number, args[1:]))
        elif name in ("__getitem__", "__setitem__"):
            index = tuple(map(bounds, args[1])) if type(args[1]) is tuple else bounds(args[1])
            args = (args[0], index, *args[2:])
        elif name == "tensor":
            args, kwargs = self._tensor_of_numbers(args, kwargs)
        elif name in _FACTORIES:
            args = pytree.tree_map(number, args)
        if "size" in kwargs:
            kwargs = {**kwargs, "size": pytree.tree_map(number, kwargs["size"])}
        return args, kwargs

    def _tensor_of_numbers(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments of `torch.tensor`, which cannot read traced tensors in a list."""
        inner = [x for x in pytree.tree_leaves(args) if isinstance(x, torch.Tensor)]
        if not inner or inner[0] is args[0] or any(self._value(x) is None for x in inner):
            return args, kwargs
        made = self._computed(torch.tensor, args, kwargs, "tensor")
        if not made:
            return args, kwargs
        with _eager():
            return (made[0].tolist(),), {**kwargs, "dtype": made[0].dtype}

    def _assume(self, name: str, args: Any, result: Any) -> bool:
        """Assume that values are finite, and draws are not negative."""
        if name == "rand":
            self._draws[id(result)] = result
            return True
        value = _FINITE.get(name)
        if name in ("lt", "__lt__") and id(args[0]) in self._draws:
            value = False if isinstance(args[1], int | float) and args[1] <= 0 else None
        if value is None or not isinstance(result, torch.Tensor):
            return False
        with _eager():
            self._values[id(result)] = result, torch.tensor(value).expand(tuple(result.shape))
        return True

    def follows(self, tensor: torch.Tensor) -> bool:
        """Whether anything is known of the values of a tensor."""
        return id(tensor) in self._draws or self._value(tensor) is not None

    def _value(self, tensor: object) -> torch.Tensor | None:
        """The values of a tensor if they are known."""
        if not isinstance(tensor, torch.Tensor):
            return None
        _, value = self._values.get(id(tensor), (None, None))
        if value is None and (fixed := self._fixed(tensor)) is not None:
            with _eager():
                value = fixed.to("cpu", copy=True)
            self._values[id(tensor)], self.has_read_fixed = (tensor, value), True
        if value is None or value.untyped_storage().data_ptr() in self._spoiled:
            return None
        return value

    def _fixed(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The model's integer tensor for this traced one, if no state dict has it."""
        if not self._reads_fixed:
            return None
        if is_functorch_wrapped_tensor(tensor):
            return None  # a traced one, within torch.vmap
        if type(tensor) is torch.Tensor:  # not traced: an attribute
            return tensor if id(tensor) not in self._homes and _is_of_integers(tensor) else None
        return next((b for home, name, b in self._buffers if home.get(name) is tensor), None)

    def _check_saved(self, tensor: torch.Tensor) -> None:
        """Refuse a branch on a buffer that state dicts have, and say how it becomes a constant."""
        for home, name, path in self._saved:
            if home.get(name) is tensor:
                message = (
                    f"the forward branches on the buffer {path!r}, which a state dict may change: "
                    f"if it never does, register it with persistent=False "
                    f"(module.register_buffer({name!r}, module.{name}, persistent=False)); then it "
                    "is a constant"
                )
                raise CaptureError(message)

    def _followed(self, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
        """The result of a call, whose values are computed when those of all operands are known."""
        name = getattr(func, "__name__", "")
        first = args[0] if args else None
        if isinstance(func, torch._ops.OpOverload):  # called by torch within a trace
            if func._schema.is_mutable:
                self._spoil(first)
            return result
        if isinstance(first, torch.Tensor) and name not in _LIKE and self._value(first) is None:
            return result  # the usual case
        operands = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        known = all(self._value(operand) is not None for operand in operands)
        starts = name in _FACTORIES if not operands else name in _LIKE
        leaves, spec = pytree.tree_flatten(result)
        if not (starts or (known and operands)) or not all(map(_may_be_small, leaves)):
            if operands and _writes(name):
                self._spoil(operands[0])
            return result
        values = self._computed(func, args, kwargs, name)
        if len(values) != len(leaves):
            return result
        leaves = [_sized(made, value) for made, value in zip(leaves, values, strict=True)]
        for made, value in zip(leaves, values, strict=True):
            if not isinstance(made, torch.Tensor) or not isinstance(value, torch.Tensor):
                continue
            # A sparse tensor has no storage to track.
            if value.layout == torch.strided and value.numel() <= LARGEST:
                self._values[id(made)] = made, value
        return pytree.tree_unflatten(leaves, spec)

    def _computed(self, func: Any, args: Any, kwargs: Any, name: str) -> list[Any]:
        """The result on values; empty for random operators and for those that cannot run."""

        def on_values(leaf: Any) -> Any:
            if isinstance(leaf, torch.device):
                return torch.device("cpu")
            if isinstance(leaf, torch.Tensor):
                value = self._value(leaf)
                # An operand that only gives shape and dtype has no values.
                empty = torch.empty(tuple(leaf.shape), dtype=leaf.dtype, device="cpu")
                return empty if value is None else value
            return leaf

        with _eager():
            before = torch.get_rng_state()
            try:
                values = pytree.tree_leaves(func(*pytree.tree_map(on_values, args),
                                                 **pytree.tree_map(on_values, kwargs)))  # fmt: skip
            except Exception:  # an operator may raise anything out of its context
                values = []
            if not torch.equal(before, torch.get_rng_state()):
                torch.set_rng_state(before)
                values = []
        if _writes(name) and not values:
            self._spoil(args[0])
        return values

    def _spoil(self, tensor: object) -> None:
        """Forget the values in the memory of a tensor: something unknown is written to it."""
        value = self._value(tensor)
        if value is not None:
            self._spoiled.add(value.untyped_storage().data_ptr())


def is_fixed(module: nn.Module, name: str, buffer: torch.Tensor | None) -> bool:
    """Whether a buffer has values that a forward may decide by, and no state dict has it."""
    return name in module._non_persistent_buffers_set and _is_of_integers(buffer)


def _is_of_integers(tensor: torch.Tensor | None) -> bool:
    """Whether a tensor has values that a forward may decide by (a grid, sizes, a mask)."""
    if tensor is None or tensor.is_floating_point() or tensor.is_complex() or tensor.is_meta:
        return False
    return tensor.layout is torch.strided and tensor.numel() <= LARGEST


def _may_be_small(result: object) -> bool:
    """Whether a result is not a tensor known to be large."""
    if not isinstance(result, torch.Tensor) or _without_numbers(result):
        return True
    return result.numel() <= LARGEST


def _without_numbers(tensor: torch.Tensor) -> bool:
    """Whether the size of a traced tensor depends on values (`nonzero`), and is not known yet."""
    return any(type(size) is not int for size in tensor.shape)


def _sized(made: Any, value: Any) -> Any:
    """A traced result, with unknown sizes set to those of its values."""
    if not isinstance(made, torch.Tensor) or not _without_numbers(made):
        return made
    for size, number in zip(made.shape, value.shape, strict=True):
        torch._check(size == number)
    return made.view(value.shape)


def _check_registered(func: Any, args: Any, result: Any) -> None:
    """Refuse a parameter that no module registered: torch.export would take it for a constant.
    (Registered ones are replaced by traced tensors.)"""
    read = (x for arg in args for x in (arg if isinstance(arg, list | tuple) else (arg,)))
    foreign = [p for p in read if type(p) is nn.Parameter and p.requires_grad]
    if not foreign or not isinstance(result, torch.Tensor) or not torch.is_grad_enabled():
        return
    name = getattr(func, "__name__", "")
    if name == "__get__":  # of a property
        name = func.__self__.__name__
    if name not in ("detach", "data", "grad"):
        message = (
            f"{name} reads a parameter {tuple(foreign[0].shape)} that is no parameter of the model "
            "there (in a closure, a list, or by a second attribute): it would not be trained. "
            "Register it in the model, or give a module that has it as loss="
        )
        raise CaptureError(message)


def _writes(name: str) -> bool:
    """Whether a function updates its first argument in place."""
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in _NOT_IN_PLACE)
    return name.endswith("_")


_NOT_IN_PLACE = frozenset(("__int__", "__invert__", "__index__", "__iter__"))


@contextmanager
def _eager() -> Iterator[None]:
    """In this context, operators run on values and are not traced."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        yield


Position = tuple[int, int]  # line and column

_TALK = ("warn", "log", "print")  # calls that only inform the user


def assumed() -> bool | None:
    """The truth value under which the caller's assertion holds; None if it is no assertion.

    `assert x`, and `if x:` where the branch does nothing but raise or warn.
    """
    frame: FrameType | None = sys._getframe(1)
    # Skip the frames of modes that pass the question on.
    while frame is not None and (
        frame.f_code.co_name == "__torch_function__" or frame.f_code.co_filename == __file__
    ):
        frame = frame.f_back
    if frame is None:
        return None
    positions = frame.f_code.co_positions()
    line, last, column, end = next(itertools.islice(positions, frame.f_lasti // 2, None))
    if line is None or last is None or column is None or end is None:
        return None
    return _wanted(frame.f_code.co_filename, (line, column), (last, end))


@lru_cache(maxsize=64)
def _tree(file: str) -> ast.Module:
    """The syntax tree of a source file; empty if it cannot be parsed."""
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ast.parse("")


@lru_cache(maxsize=1024)
def _wanted(file: str, start: Position, end: Position) -> bool | None:
    """The truth value of the expression between two positions with which execution continues."""
    for node in ast.walk(_tree(file)):
        goal = _goal(node)
        if goal is None:
            continue
        assert isinstance(node, ast.Assert | ast.If)
        parts = list(_logic(node.test))
        if _extent(node) == (start, end):  # the interpreter evaluates the statement's test
            signs = {sign for part, sign in parts if not isinstance(part, ast.BoolOp | ast.UnaryOp)}
            return goal == signs.pop() if len(signs) == 1 else None
        for part, sign in parts:
            if _extent(part) == (start, end):
                return goal == sign
    return None


def _goal(node: ast.AST) -> bool | None:
    """The outcome of a test with which execution continues; None if both may."""
    if isinstance(node, ast.Assert):
        return True
    if isinstance(node, ast.If) and _harmless(node.body):
        return False
    if isinstance(node, ast.If) and node.orelse and _harmless(node.orelse):
        return True
    return None


def _logic(test: ast.expr, sign: bool = True) -> Iterator[tuple[ast.expr, bool]]:
    """A test and the operands of its `not`, `and` and `or`, each with its sign: False if
    negated."""
    inner: list[ast.expr] = test.values if isinstance(test, ast.BoolOp) else []
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner, sign = [test.operand], not sign
    yield test, sign
    for part in inner:
        yield from _logic(part, sign)


def _extent(node: ast.stmt | ast.expr) -> tuple[Position, tuple[int | None, int | None]]:
    """Start and end of a node in its source."""
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)


def _harmless(body: list[ast.stmt]) -> bool:
    """Whether statements only raise, or inform the user."""
    if any(isinstance(statement, ast.Raise) for statement in body[-1:]):
        return True
    values = [s.value if isinstance(s, ast.Expr) else None for s in body]
    calls = [value for value in values if not isinstance(value, ast.Constant)]
    return all(
        isinstance(call, ast.Call) and any(word in ast.unparse(call.func) for word in _TALK)
        for call in calls
    )
