"""The attributes of a layer's class: its tensors under the names of the model's module tree.

    self.norm = nn.LayerNorm(16)                    if it is equivalent to the operator
    self.attention = nn.Module()                    holds others
    self.attention.qkv = nn.Linear(16, 48)
    self.attention.scale = nn.Parameter(torch.empty(2))     any other tensor

`mlp.0.weight` is no attribute path: it becomes `mlp_0.weight`, which `names` tells the runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import fx

from parcompiler.capture.blocks import steps
from parcompiler.capture.templates import ATTRIBUTES, identifier, relative_name, unique
from parcompiler.codegen.calls import BoundCall, bind
from parcompiler.codegen.layout import remarked, table, wrap
from parcompiler.codegen.literals import literal, string
from parcompiler.graph import Block, Graph, Parameter
from parcompiler.pieces import Shard  # noqa: F401 (the doctest's)
from parcompiler.runtime.stage import name_in_model


class BlockAttributes:
    """The attributes of the class of a block.

    `places` are the paths of its tensors, in order; `operands` has them as expressions, by node.
    `calls` maps nodes that a module of torch.nn computes to that module and its argument; `counted`
    are the nodes that count batches, which such a module does itself. `names` maps paths that
    differ from the model's to the model's names, relative to the layer if they start with a dot.
    `deferring` are the nodes that leave the gradients of their weights for later, `again` those
    that run again in the backward.
    """

    def __init__(
        self,
        graph: Graph,
        block: Block,
        deferring: Collection[fx.Node] = (),
        again: Collection[fx.Node] = (),
    ) -> None:
        self._block = block
        self._tensors = [graph.by_name[binding.name] for binding in block.tensors]
        self.deferring, self.again = deferring, again
        self._paths: dict[str, str] = {}
        self._taken: dict[str, set[str]] = {}
        self.names: dict[str, str] = {}
        keys = [relative_name(item.name, block.scope) for item in self._tensors]
        self.places = tuple(self._path(key) for key in keys)
        nodes = {item.node: place for item, place in zip(self._tensors, self.places, strict=True)}
        readers: dict[str, list[fx.Node]] = {item.node: [] for item in self._tensors}
        self.operands: dict[fx.Node, str] = {}
        for node in block.nodes:
            for operand in node.all_input_nodes:
                if operand.name in nodes:
                    self.operands[operand] = f"self.{nodes[operand.name]}"
                    readers[operand.name].append(node)
        self.calls: dict[fx.Node, tuple[str, fx.Node]] = {}
        self.counted: set[fx.Node] = set()
        self._made: dict[str, str] = {}  # the lines that make modules, by path
        for owner in dict.fromkeys(place.rpartition(".")[0] for place in self.places):
            if owner:
                self._make(owner, readers)

    def constructor(self) -> list[str]:
        """The lines that make the tensors, and the modules that hold them."""
        lines: dict[str, str] = {}
        for place, item in zip(self.places, self._tensors, strict=True):
            owner = ""
            for part in place.split(".")[:-1]:
                owner = f"{owner}.{part}".lstrip(".")
                if owner not in lines:
                    lines[owner] = self._made.get(owner, f"        self.{owner} = nn.Module()")
            if owner not in self._made:
                lines[place] = tensor_line(place, item)
        return list(lines.values())

    def _path(self, key: str) -> str:
        """The attribute path for a name of the model, which is relative to the layer."""
        if key in self._paths:
            return self._paths[key]
        parent, _, last = key.rpartition(".")
        owner, wish = self._path(parent) if parent else "", identifier(last)
        if wish != last and owner:  # e.g. a number: joined to its parent's name
            owner, _, before = owner.rpartition(".")
            wish = identifier(f"{before}_{last}")
        if wish.startswith("__"):  # Python would mangle the name
            wish = f"a{wish}"
        wish = unique(wish, self._taken.setdefault(owner, set(ATTRIBUTES)))
        path = self._paths[key] = f"{owner}.{wish}".lstrip(".")
        scope = self._block.scope
        name = f"{scope}{key}" if key.startswith(".") else key
        if name_in_model(path, self.names, scope) != name:
            self.names[path] = key
        return path

    def _make(self, owner: str, readers: Mapping[str, Sequence[fx.Node]]) -> None:
        """Use a module of torch.nn for the tensors of `owner`, if it computes all their readers.

        The model must have that module there, and call it: it computes its operator only.
        """
        tensors = {
            place.removeprefix(f"{owner}."): item
            for place, item in zip(self.places, self._tensors, strict=True)
            if place.startswith(f"{owner}.")
        }
        nodes = dict.fromkeys(node for item in tensors.values() for node in readers[item.node])
        where = name_in_model(owner, self.names, self._block.scope)
        counters = {node for node in nodes if _is_counter(node, tensors)}
        computing = [node for node in nodes if node not in counters]
        made = {
            _module(node, where, tensors, deferred=node in self.deferring) for node in computing
        }
        if None in made or len(made) != 1 or len(counters) not in (0, len(computing)):
            return
        pieces = [whole_shape(item) for item in tensors.values() if item.shard is not None]
        line = wrap(f"self.{owner} = {made.pop()}", 8)
        self._made[owner] = remarked(line, f"a piece of {pieces[0]}") if pieces else line
        self.counted |= counters
        for node in computing:
            values = bind(node, str).values
            argument = values["indices" if "indices" in values else "input"]
            assert isinstance(argument, fx.Node)
            self.calls[node] = (f"self.{owner}", argument)


def _is_counter(node: fx.Node, tensors: Mapping[str, Parameter]) -> bool:
    """Whether a node is the one by which a batch norm counts batches."""
    counter = tensors.get("num_batches_tracked")
    first, *rest = node.args
    return (
        counter is not None
        and node.target is torch.ops.aten.add_.Tensor
        and isinstance(first, fx.Node)
        and first.name == counter.node
        and (rest, node.users, dict(node.kwargs)) == ([1], {}, {})
    )


def _module(
    node: fx.Node, path: str, tensors: Mapping[str, Parameter], *, deferred: bool
) -> str | None:
    """The expression of the module of torch.nn at `path` that computes a node with `tensors`.

    None if the model has none there, or the module would call the operator with other arguments.
    """
    stack = node.meta.get("nn_module_stack")
    if not stack or not isinstance(node.target, torch._ops.OpOverload) or not steps(node):
        return None
    if not isinstance(node.meta["val"], torch.Tensor):  # several results: `native_layer_norm`
        return None
    package, _, name = str(list(stack.values())[-1][1]).rpartition(".")
    known = package.startswith("torch.nn.modules.") and steps(node)[-1].path == path
    if not known or name not in MODULES or "synchronized" in node.meta:
        return None
    parameters = [item for item in tensors.values() if not item.buffer]
    if len({(item.dtype, item.trainable) for item in parameters}) != 1 or "weight" not in tensors:
        return None
    call = bind(node, str)
    read = {leaf: call.values[leaf] for leaf in TENSORS if call.values.get(leaf) is not None}
    nodes = {leaf: item.node for leaf, item in tensors.items() if leaf != "num_batches_tracked"}
    if {leaf: getattr(value, "name", None) for leaf, value in read.items()} != nodes:
        return None
    arguments = MODULES[name](call, tensors["weight"].shape)
    if arguments is None or ("num_batches_tracked" in tensors) != name.startswith("BatchNorm"):
        return None
    if "bias" in call.values and "bias" not in tensors:
        arguments = [*arguments, "bias=False"]
    if parameters[0].dtype != torch.float32:
        arguments = [*arguments, f"dtype={literal(parameters[0].dtype)}"]
    made = f"{'runtime.Linear' if deferred else f'nn.{name}'}({', '.join(arguments)})"
    return made if parameters[0].trainable else f"{made}.requires_grad_(False)"


def _linear(call: BoundCall, shape: Sequence[int]) -> list[str] | None:
    """`nn.Linear(in_features, out_features)`."""
    return [literal(size) for size in reversed(shape)] if call.key == "linear.default" else None


def _embedding(call: BoundCall, shape: Sequence[int]) -> list[str] | None:
    """`nn.Embedding(num_embeddings, embedding_dim)`."""
    padding = call.values.get("padding_idx")
    if "scale_grad_by_freq" not in call.defaults or not isinstance(padding, int):
        return None
    more = [f"padding_idx={padding}"] if padding >= 0 else []
    more += ["sparse=True"] * bool(call.values.get("sparse"))
    return [*map(literal, shape), *more] if padding >= -1 else None


def _layer_norm(call: BoundCall, shape: Sequence[int]) -> list[str] | None:
    """`nn.LayerNorm(normalized_shape)`, and so `nn.RMSNorm`."""
    usual = 1e-05 if "bias" in call.values else None
    sizes = call.values["normalized_shape"]
    if not isinstance(sizes, list | tuple) or tuple(sizes) != tuple(shape):
        return None
    eps = [] if call.values["eps"] == usual else [f"eps={call.text('eps')}"]
    return [literal(sizes[0] if len(sizes) == 1 else tuple(sizes)), *eps]


def _group_norm(call: BoundCall, shape: Sequence[int]) -> list[str] | None:
    """`nn.GroupNorm(num_groups, num_channels)`."""
    eps = [] if call.values["eps"] == 1e-05 else [f"eps={call.text('eps')}"]
    return [call.text("num_groups"), literal(shape[0]), *eps]


def _conv(call: BoundCall, shape: Sequence[int]) -> list[str] | None:
    """`nn.Conv2d(in_channels, out_channels, kernel_size)`, and so for other dimensions."""
    groups = call.values["groups"]
    assert isinstance(groups, int)
    size = literal(shape[2] if len({*shape[2:]}) == 1 else tuple(shape[2:]))
    options = ("stride", "padding", "dilation", "groups")
    more = [f"{name}={call.brief(name)}" for name in options if name not in call.defaults]
    return [literal(shape[1] * groups), literal(shape[0]), size, *more]


def _batch_norm(call: BoundCall, shape: Sequence[int]) -> list[str] | None:
    """`nn.BatchNorm2d(num_features)`, and so for other dimensions; it follows the module's mode."""
    if call.values["training"] is not True or not isinstance(call.values["momentum"], float):
        return None
    usual = {"eps": 1e-05, "momentum": 0.1}
    more = [f"{name}={call.text(name)}" for name in usual if call.values[name] != usual[name]]
    return [literal(shape[0]), *more]


TENSORS = ("weight", "bias", "running_mean", "running_var")

# By class of the model's module: its constructor arguments for the operator's options.
MODULES: Mapping[str, Callable[[BoundCall, Sequence[int]], list[str] | None]] = {
    "Linear": _linear,
    "Embedding": _embedding,
    "LayerNorm": _layer_norm,
    "RMSNorm": _layer_norm,
    "GroupNorm": _group_norm,
    "BatchNorm1d": _batch_norm,
    "BatchNorm2d": _batch_norm,
    "BatchNorm3d": _batch_norm,
    "Conv1d": _conv,
    "Conv2d": _conv,
    "Conv3d": _conv,
}


def names_table(names: Mapping[str, str]) -> list[str]:
    """The class attribute that maps attributes to the model's names."""
    if not names:
        return []
    rows = [(string(attribute), string(name)) for attribute, name in names.items()]
    return [*table("names = {", rows, "}", 4), ""]


def constructor(lines: Sequence[str]) -> list[str]:
    """`__init__` with these lines; empty if there are none."""
    if not lines:
        return []
    return ["    def __init__(self) -> None:", "        super().__init__()", *lines, ""]


def tensor_line(attribute: str, item: Parameter, made: str | None = None) -> str:
    """The line that makes a parameter or buffer, uninitialized unless `made` is given."""
    if made is None:
        sizes = ", ".join(map(literal, item.shape)) or "()"
        dtype = "" if item.dtype == torch.float32 else f", dtype={literal(item.dtype)}"
        made = f"torch.empty({sizes}{dtype})"
    if item.buffer:
        owner, _, name = f"self.{attribute}".rpartition(".")
        line = wrap(f'{owner}.register_buffer("{name}", {made})', 8)
    else:
        frozen = "" if item.trainable else ", requires_grad=False"
        line = wrap(f"self.{attribute} = nn.Parameter({made}{frozen})", 8)
    return line if item.shard is None else remarked(line, f"a piece of {whole_shape(item)}")


def whole_shape(item: Parameter) -> str:
    """The whole shape of a tensor that ranks hold in pieces.

    >>> shard = Shard(0, (48,))
    >>> whole_shape(Parameter("qkv.weight", "w", (24, 16), torch.float32, shard=shard))
    '48 x 16'
    """
    assert item.shard is not None
    return " x ".join(map(str, item.shard.shape(item.shape)))
