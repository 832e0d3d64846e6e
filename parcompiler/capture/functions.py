"""Custom `torch.autograd.Function`s: their backward is the user's, so each stays a single node.

`torch.export` traces through `MyFunction.apply(x)` and keeps the operators of its forward, whose
own derivatives may be others. Here the application is recorded as one operator; afterwards its
node calls `MyFunction.apply`, and the emitted code imports the class from where it is defined.
"""

from __future__ import annotations

import functools
import importlib
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.autograd.function import _is_setup_context_defined
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointFunction

from parcompiler.capture.patches import patched
from parcompiler.errors import CaptureError

_CONSTANT = int | float | bool | str | complex | torch.dtype | torch.device | None


@dataclass(frozen=True)
class Applied:
    """The target of a node that applies the Function `name` of `module`.

    >>> Applied("package.file", "Clip")
    package.file.Clip.apply
    """

    module: str
    name: str
    random: bool = field(default=False, compare=False)

    def __call__(self, *args: Any) -> Any:
        """Apply the Function."""
        owner = importlib.import_module(self.module)
        return functools.reduce(getattr, self.name.split("."), owner).apply(*args)

    def __repr__(self) -> str:
        """The call as Python has it."""
        return f"{self.module}.{self.name}.apply"

    @property
    def __name__(self) -> str:
        """The name that torch.fx gives the node."""
        return self.name.rpartition(".")[2]


@dataclass
class _Application:
    """One application while it is traced; in `template` None stands for each tensor among the
    arguments."""

    kind: type[torch.autograd.Function]
    forward: Callable[..., Any]
    template: tuple[Any, ...]
    places: tuple[int, ...]
    single: bool = True
    random: bool = False

    def arguments(self, operands: Sequence[Any]) -> list[Any]:
        """The arguments, with operands in the places of tensors."""
        arguments = list(self.template)
        for place, operand in zip(self.places, operands, strict=True):
            arguments[place] = operand
        return arguments

    def run(self, operands: list[torch.Tensor]) -> list[torch.Tensor]:
        """Apply the Function to tensors; notes whether the result is single and whether it is
        random."""
        with patched(self.kind, forward=staticmethod(self.forward)), _SeesDraws() as seen:
            result = self.kind.apply(*self.arguments(operands))
        self.random = seen.random
        self.single = isinstance(result, torch.Tensor)
        results = [result] if self.single else list(result)
        if not all(isinstance(item, torch.Tensor) for item in results):
            message = f"the autograd Function {self.kind.__qualname__} returns more than tensors"
            raise CaptureError(message)
        return results


class _SeesDraws(TorchDispatchMode):
    """Detects whether random numbers are drawn."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.random = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`."""
        self.random |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


_calls: list[_Application] = []
_library = torch.library.Library("parcompiler", "FRAGMENT")
_library.define("function(Tensor[] operands, int call) -> Tensor[]")


def _run(operands: list[torch.Tensor], call: int) -> list[torch.Tensor]:
    """The operator that stands for an application while it is traced."""
    return _calls[call].run(operands)


_library.impl("function", _run, "CompositeExplicitAutograd")
torch.library.register_fake("parcompiler::function", _run, lib=_library)


@contextmanager
def recorded() -> Iterator[None]:
    """Context of a trace: an application of a Function that is not torch's own becomes one node.

    Their forwards are replaced, not `apply`, which a module may have bound to a name
    (`clip = Clip.apply`), and which is torch's C code from torch 2.14 on. Functions that are
    defined meanwhile, in a forward or a module that it imports, are included.
    """
    base = torch.autograd.Function
    forwards = {kind: kind.forward for kind in _kinds(base)}
    with ExitStack() as stack:

        def record(kind: type[torch.autograd.Function], forward: Callable[..., Any]) -> None:
            if kind is CheckpointFunction or kind.__module__.partition(".")[0] != "torch":
                recording = staticmethod(_recording(kind, forward))
                stack.enter_context(patched(kind, forward=recording))

        def defined(kind: type[torch.autograd.Function]) -> None:
            record(kind, kind.forward)

        for kind, forward in forwards.items():
            record(kind, forward)
        with patched(base, __init_subclass__=classmethod(defined)):
            yield


def _recording(
    kind: type[torch.autograd.Function], forward: Callable[..., Any]
) -> Callable[..., Any]:
    """The replacement of `kind.forward` during a trace; torch reads defaults from its signature."""

    @functools.wraps(forward)
    def record(*arguments: Any) -> Any:
        return _recorded(kind, forward, *arguments)

    return record


def _kinds(base: type[torch.autograd.Function]) -> Iterator[type[torch.autograd.Function]]:
    """All subclasses of Function."""
    for kind in base.__subclasses__():
        yield kind
        yield from _kinds(kind)


def _recorded(
    kind: type[torch.autograd.Function], forward: Callable[..., Any], *passed: Any
) -> Any:
    """Record an application, in place of the forward."""
    if kind is CheckpointFunction:
        message = (
            "checkpoint(use_reentrant=True) cannot be captured, because it runs its forward "
            "without gradients: pass use_reentrant=False, or leave recomputing to "
            "compile(recompute=)"
        )
        raise CaptureError(message)
    apart = _is_setup_context_defined(kind.setup_context)  # then forward takes no ctx
    arguments = passed if apart else passed[1:]
    operands = [item for item in arguments if isinstance(item, torch.Tensor)]
    if not operands:
        return forward(*passed)
    _check(kind, arguments)
    places = tuple(i for i, item in enumerate(arguments) if isinstance(item, torch.Tensor))
    template = tuple(None if i in places else item for i, item in enumerate(arguments))
    _calls.append(_Application(kind, forward, template, places))
    results = torch.ops.parcompiler.function(operands, len(_calls) - 1)
    return results[0] if _calls[-1].single else tuple(results)


def _check(kind: type[torch.autograd.Function], arguments: tuple[Any, ...]) -> None:
    """Refuse a Function that emitted code could not call."""
    name = kind.__qualname__
    for item in arguments:
        if not isinstance(item, torch.Tensor | _CONSTANT) and not _is_plain(item):
            message = (
                f"the autograd Function {name} takes a {type(item).__name__}, which may hide "
                "parameters: pass it tensors and numbers only"
            )
            raise CaptureError(message)
    owner: Any = sys.modules.get(kind.__module__)
    imported = None if "<locals>" in name else functools.reduce(getattr, name.split("."), owner)
    if imported is not kind or kind.__module__ == "__main__":
        message = (
            f"the autograd Function {name} cannot be imported by the ranks: define it at the top "
            "of a module that they can import"
        )
        raise CaptureError(message)


def _is_plain(item: object) -> bool:
    """Whether an argument is a sequence of constants, or a dict of them."""
    if isinstance(item, dict):
        return all(isinstance(key, str) and _is_plain([part]) for key, part in item.items())
    return isinstance(item, list | tuple) and all(isinstance(part, _CONSTANT) for part in item)


def call_functions(graph: fx.Graph) -> None:
    """Make the nodes that stand for applications call the Functions, without `getitem` for a single
    result."""
    for node in list(graph.nodes):
        if node.target is torch.ops.parcompiler.function.default:
            _replace(graph, node)
    _calls.clear()


def _replace(graph: fx.Graph, node: fx.Node) -> None:
    """Replace one node that stands for an application."""
    operands, number = node.args
    assert isinstance(number, int)
    assert isinstance(operands, list | tuple)
    call = _calls[number]
    target = Applied(call.kind.__module__, call.kind.__qualname__, call.random)
    with graph.inserting_before(node):
        made = graph.call_function(target, tuple(call.arguments(operands)))
    made.meta = dict(node.meta)
    made.meta["val"] = node.meta["val"][0] if call.single else tuple(node.meta["val"])
    for user in list(node.users):
        if call.single and user.target is operator.getitem:
            user.replace_all_uses_with(made)
            graph.erase_node(user)
    node.replace_all_uses_with(made)
    graph.erase_node(node)
