"""One node of a captured graph as idiomatic Python.

>>> graph = fx.Graph()
>>> x, w = graph.placeholder("x"), graph.placeholder("w")
>>> aten = torch.ops.aten
>>> expression(graph.call_function(aten.linear.default, (x, w)), str)
'F.linear(x, w)'
>>> expression(graph.call_function(aten.linear.default, (x, w)), str, deferring=True)
'runtime.linear(x, w)'
>>> expression(graph.call_function(aten.slice.Tensor, (x, 1, 0, 12)), str)
'x[:, :12]'
>>> expression(graph.call_function(aten.logaddexp.default, (x, w)), str)  # has no spelling
'torch.ops.aten.logaddexp.default(x, w)'

The text may use `torch`, `F` (torch.nn.functional), `runtime`, `DEVICE` (the device of the rank)
and `self.training`: operators captured in training mode follow the mode of the module, those
captured in evaluation mode stay in it.
"""

import itertools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from keyword import iskeyword

import torch
from torch import fx

from parcompiler.capture.evaluation import BY_MODE
from parcompiler.capture.functions import Applied
from parcompiler.codegen.calls import BoundCall, bind
from parcompiler.codegen.literals import Operand, literal
from parcompiler.codegen.spellings import Spelling, fill, spellings
from parcompiler.errors import InputError
from parcompiler.spmd.runtime_call import RuntimeCall

OPEN_END = 2**63 - 1  # the end of a slice without an end

BUILTINS: Mapping[object, str] = {
    operator.getitem: "{}[{}]",
    operator.add: "{} + {}",
    operator.sub: "{} - {}",
    operator.mul: "{} * {}",
    operator.truediv: "{} / {}",
    operator.floordiv: "{} // {}",
    operator.mod: "{} % {}",
    operator.neg: "-{}",
    operator.eq: "{} == {}",
    operator.ne: "{} != {}",
    operator.lt: "{} < {}",
    operator.le: "{} <= {}",
    operator.gt: "{} > {}",
    operator.ge: "{} >= {}",
}


def expression(node: fx.Node, operand: Operand, *, deferring: bool = False) -> str:
    """The Python that computes a `call_function` node; `operand` names the nodes that it reads.

    It makes the same call into ATen, or one with the same value and gradient, bit for bit. A node
    that is `deferring` (see capture/deferrable.py) can leave the gradient of its weight for later.
    """
    if isinstance(node.target, Applied):
        return f"{node.target!r}({', '.join(literal(item, operand) for item in node.args)})"
    if node.target is BY_MODE:
        trained, evaluated = (literal(item, operand) for item in node.args)
        return f"{trained} if self.training else {evaluated}"
    if isinstance(node.target, RuntimeCall):
        return _of_runtime(node, operand)
    if not isinstance(node.target, torch._ops.OpOverload):
        return _builtin(node, operand)
    call = bind(node, operand)
    if deferring:
        return fill(DEFERRED[call.key], call)
    if "synchronized" in node.meta:
        return fill(SYNCHRONIZED[call.key], call)
    write = SPECIALS.get(call.key, _spelled)
    text = write(call) if call.reads_as_written() else None
    return text or _in_full(call)


def _of_runtime(node: fx.Node, operand: Operand) -> str:
    """A call of the runtime; an operator among its arguments is written by its full name."""
    texts = [_full_name(item) if isinstance(item, torch._ops.OpOverload) else literal(item, operand)
             for item in node.args]  # fmt: skip
    for name, value in node.kwargs.items():
        switched = name == "dropout_p" and value
        text = f"{literal(value, operand)}{' if self.training else 0.0' if switched else ''}"
        texts.append(f"{name}={text}")
    return f"{node.target!r}({', '.join(texts)})"


def _builtin(node: fx.Node, operand: Operand) -> str:
    """A function of Python itself: on lists of tensors, or on sizes."""
    if node.target not in BUILTINS or node.kwargs:
        message = f"{node.name} calls {node.target}, which is no ATen operator: export the model"
        raise InputError(message)
    return BUILTINS[node.target].format(*(literal(item, operand) for item in node.args))


def _spelled(call: BoundCall) -> str | None:
    """The first spelling that has all arguments which are not defaults, if any."""
    needed = call.values.keys() - call.defaults
    return next((fill(item, call) for item in spellings(call.key) if needed <= item.names), None)


def _in_full(call: BoundCall) -> str:
    """The call by its full name, which is right for every operator."""
    head = _full_name(call.target)
    positional = [name for name, item in call.arguments.items() if not item.kwarg_only]
    while positional and positional[-1] in call.defaults:
        positional.pop()
    named = [name for name, item in call.arguments.items() if item.kwarg_only]
    texts = [call.text(name) for name in positional]
    texts += [f"{name}={call.text(name)}" for name in named if name not in call.defaults]
    return f"{head}({', '.join(texts)})"


def _full_name(target: torch._ops.OpOverload) -> str:
    """The full name of an operator, also if that is no valid Python."""
    namespace, name = target._schema.name.split("::")
    head = "torch.ops"
    for part in (namespace, name, target._schema.overload_name or "default"):
        head = _member(head, part)
    return head


def _member(owner: str, name: str) -> str:
    """An attribute access, also for a name that Python does not allow (`aten.random.from`)."""
    mangled = name.startswith("__") and not name.endswith("__")
    if name.isidentifier() and not iskeyword(name) and not mangled:
        return f"{owner}.{name}"
    return f"getattr({owner}, {literal(name)})"


def _bounds(call: BoundCall) -> Iterator[str]:
    """Start, end and step of a slice, each empty where it is open."""
    start, end, step = (call.values[name] for name in ("start", "end", "step"))
    yield "" if start is None or start == 0 else call.text("start")
    yield "" if end is None or end == OPEN_END else call.text("end")
    if step != 1:
        yield call.text("step")


def _at(call: BoundCall, index: str) -> str:
    """An index into one dimension: `x[:, 0]`, or `x[..., 0]` for the last of three or more."""
    owner, dim = call.values["self"], call.values["dim"]
    rank = owner.meta["val"].ndim if isinstance(owner, fx.Node) and "val" in owner.meta else None
    assert isinstance(dim, int)
    if dim < 0 and rank is not None:
        dim += rank
    if dim < 0 or (dim >= 2 and dim + 1 == rank):
        after = ", :" * (-dim - 1)  # nothing after the last
        return f"{call.text('self')}[..., {index}{after}]"
    return f"{call.text('self')}[{':, ' * dim}{index}]"


def _index(call: BoundCall) -> str | None:
    """`x[:, i]`; not for a tensor without dimensions, which Python would take for a number."""
    indices = call.values["indices"]
    assert isinstance(indices, list | tuple)
    while indices and indices[-1] is None:
        indices = indices[:-1]
    tensors = [item for item in indices if isinstance(item, fx.Node)]
    if not tensors or not all("val" in item.meta and item.meta["val"].ndim for item in tensors):
        return None
    texts = (":" if item is None else literal(item, call.operand) for item in indices)
    return f"{call.text('self')}[{', '.join(texts)}]"


def _index_put(call: BoundCall) -> str | None:
    """`index_put` as a method, which takes no None among its indices."""
    indices = call.values["indices"]
    assert isinstance(indices, list | tuple)
    return None if None in indices else _spelled(call)


def _embedding(call: BoundCall) -> str | None:
    """`F.embedding` counts a negative `padding_idx` from the end; in ATen it means none."""
    padding = call.values["padding_idx"]
    return _spelled(call) if isinstance(padding, int) and padding >= -1 else None


def _histogram(call: BoundCall) -> str | None:
    """A histogram; for integers the runtime's, as programs for GPUs may run on CPUs too."""
    operand = call.values["self"]
    integers = isinstance(operand, fx.Node) and not operand.meta["val"].is_floating_point()
    return fill(HISTOGRAM, call) if integers else _spelled(call)


def _einsum(call: BoundCall) -> str | None:
    """An einsum; with three or more operands in full, as `torch.einsum` chooses an order by what is
    installed."""
    operands = call.values["tensors"]
    return _spelled(call) if isinstance(operands, list | tuple) and len(operands) < 3 else None


def _view(call: BoundCall) -> str | None:
    """A view that reads unchanged sizes off the operand, so that batch and sequence are no
    constants.

    Unchanged leading dimensions are read from the operand; the dimension made from all others, or
    from those before unchanged trailing ones, is -1. In row-major order this is right for all
    sizes.
    """
    name, before, sizes = _reshaped(call, "size" if "size" in call.values else "shape")
    if not before or not sizes or not all(before):
        return None
    known = math.prod(size for size in sizes if size != -1)
    after = [math.prod(before) // known if size == -1 else size for size in sizes]
    kept = _common(before, after)
    ending = 0 if kept else _common(before[::-1], after[::-1])
    joined = len(after) - kept - ending == 1 and kept < len(before)  # all the rest becomes one
    if not kept and not joined:
        return None
    rest = ["-1", *map(str, after[kept + 1 :])] if joined else [str(size) for size in sizes[kept:]]
    shape = f"{name}.shape[0]" if kept == 1 else f"*{name}.shape[:{kept}]"
    shape = f"*{name}.shape" if kept == len(before) else shape
    method = call.key.partition(".")[0]
    return f"{name}.{method}({', '.join([shape] * bool(kept) + rest)})"


def _expand(call: BoundCall) -> str | None:
    """An expansion in which unchanged dimensions are -1."""
    name, before, sizes = _reshaped(call, "size")
    new = len(sizes) - len(before)
    if not before or not {"implicit"} <= call.defaults:
        return None
    texts = [
        "-1" if k >= new and size == before[k - new] else str(size) for k, size in enumerate(sizes)
    ]
    return f"{name}.expand({', '.join(texts)})"


def _reshaped(call: BoundCall, argument: str) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """The operand of a reshape, its sizes, and the requested sizes.

    Both are empty if the operand is no variable, or some size is no plain number (it depends on
    data).
    """
    owner, sizes, name = call.values["self"], call.values[argument], call.text("self")
    assert isinstance(sizes, list | tuple)
    if not name.isidentifier() or not isinstance(owner, fx.Node) or "val" not in owner.meta:
        return name, (), ()
    before = tuple(owner.meta["val"].shape)
    plain = all(type(size) is int for size in (*before, *sizes))
    return (name, before, tuple(sizes)) if plain else (name, (), ())


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """The length of the common prefix of two sequences."""
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    return len(list(pairs))


SPECIALS: Mapping[str, Callable[[BoundCall], str | None]] = {
    "select.int": lambda call: _at(call, call.text("index")),
    "slice.Tensor": lambda call: _at(call, ":".join(_bounds(call))),
    "index.Tensor": _index,
    "index_put.default": _index_put,
    "index_put_.default": _index_put,
    "embedding.default": _embedding,
    "einsum.default": _einsum,
    "histc.default": _histogram,
    "expand.default": lambda call: _expand(call) or _spelled(call),
    "view.default": lambda call: _view(call) or _spelled(call),
    "reshape.default": lambda call: _view(call) or _spelled(call),
}

HISTOGRAM = Spelling("runtime.histogram(self, bins=bins, least=min, most=max)")

# Batch norms over the batches of all data ranks (see capture/synchronized.py).
SYNCHRONIZED: Mapping[str, Spelling] = {
    "batch_norm.default": Spelling(
        "runtime.sync_batch_norm(input, running_mean, running_var, weight, bias, training,"
        " momentum, eps)"
    ),
}

DEFERRED: Mapping[str, Spelling] = {
    "linear.default": Spelling("runtime.linear(input, weight, bias)"),
    "addmm.default": Spelling("runtime.addmm(self, mat1, mat2)"),
}
