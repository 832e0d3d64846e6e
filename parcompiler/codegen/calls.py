"""A node of the graph with every argument by its name in the operator's schema.

>>> graph = fx.Graph()
>>> x, w = graph.placeholder("x"), graph.placeholder("w")
>>> call = bind(graph.call_function(torch.ops.aten.dropout.default, (x, 0.1, True)), str)
>>> call.key, [call.text(name) for name in call.values]
('dropout.default', ['x', '0.1', 'self.training'])
>>> call = bind(graph.call_function(torch.ops.aten.conv2d.default, (x, w, None, [2, 2])), str)
>>> sorted(call.values.keys() - call.defaults), call.text("stride"), call.brief("stride")
(['input', 'stride', 'weight'], '(2, 2)', '2')
"""

from collections.abc import Mapping
from dataclasses import dataclass
from keyword import iskeyword

import torch
from torch import fx

from parcompiler.capture.effects import MODES
from parcompiler.codegen.literals import Operand, literal, real
from parcompiler.spmd.elementwise import REDUCTIONS

Number = int | float | complex | torch.SymInt | torch.SymFloat | torch.SymBool

# Operators that accept a Python number for a tensor (torch/csrc/utils/python_arg_parser.cpp).
NUMBERS = frozenset(
    f"aten::{name}{suffix}"
    for name in ("add", "sub", "mul", "div", "floor_divide")
    for suffix in ("", "_")
) | {"aten::copy_"}


@dataclass(frozen=True, slots=True)
class BoundCall:
    """One call of an operator, with its arguments by their Python names."""

    target: torch._ops.OpOverload
    arguments: Mapping[str, torch.Argument]
    values: Mapping[str, object]
    defaults: frozenset[str]  # the arguments that may be left out
    operand: Operand

    @property
    def key(self) -> str:
        """The operator's name in tables: without the namespace of ATen."""
        return str(self.target).removeprefix("aten.")

    def text(self, name: str) -> str:
        """An argument as source, in the form of the schema."""
        value = self.values[name]
        if name in MODES and value is True:
            # A norm without running statistics uses those of the batch in evaluation, too.
            without = self.target._schema.overload_name.startswith("no_stats")
            if not without and self.values.get("running_mean", "no norm") is not None:
                return "self.training"
        if name == "dropout_p" and isinstance(value, float) and value > 0:
            return f"{real(value)} if self.training else 0.0"
        return literal(value, self.operand)

    def brief(self, name: str) -> str:
        """An argument as source, in the form of methods and of `torch.nn.functional`."""
        value = self.values[name]
        if name == "reduction" and isinstance(value, int):
            return literal(REDUCTIONS[value])
        size: int | None = getattr(self.arguments[name], "N", None)  # 2 in `int[2] stride`
        if isinstance(value, list | tuple) and len(value) == size:
            if all(item == value[0] for item in value):  # [2, 2] is 2
                return literal(value[0], self.operand)
        return self.text(name)

    def needs_no_keyword(self, name: str) -> bool:
        """Whether an argument may be left out as a keyword: it has its default, or is None."""
        passed = self.values[name] is not None or self.arguments[name].has_default_value()
        return name in self.defaults or not passed

    def reads_as_written(self) -> bool:
        """Whether tensors are exactly where the schema has them: else Python would choose another
        overload."""
        values = zip(self.arguments.values(), self.values.values(), strict=True)
        return all(
            self._reads_as_written(argument, value, first=position == 0)
            for position, (argument, value) in enumerate(values)
        )

    def _reads_as_written(self, argument: torch.Argument, value: object, *, first: bool) -> bool:
        wants_tensor = str(argument.type) in {"Tensor", "Optional[Tensor]"}
        if isinstance(value, fx.Node) and "val" in value.meta:
            value = value.meta["val"]
        if wants_tensor and isinstance(value, Number):
            return self.target._schema.name in NUMBERS and not first
        return wants_tensor or not isinstance(value, torch.Tensor)


def bind(node: fx.Node, operand: Operand) -> BoundCall:
    """Bind the arguments of an operator's call to their names."""
    assert isinstance(node.target, torch._ops.OpOverload)
    schema = node.target._schema.arguments  # `from` is a keyword of Python
    arguments = {f"{a.name}_" if iskeyword(a.name) else str(a.name): a for a in schema}
    passed = dict(zip(arguments, node.args, strict=False)) | node.kwargs
    if not any("Tensor" in str(argument.type) for argument in arguments.values()):
        passed["device"] = torch.device("cpu")  # a factory: on the device of the rank
    values = {name: passed.get(name, item.default_value) for name, item in arguments.items()}
    defaults = {name for name, item in arguments.items() if _is_default(item, values[name])}
    if passed.get("eps") is not None:
        defaults.discard("eps")  # always written, even if it is the default
    return BoundCall(node.target, arguments, values, frozenset(defaults), operand)


def _is_default(argument: torch.Argument, value: object) -> bool:
    """Whether the call means the same without the argument."""
    default = argument.default_value
    if not argument.has_default_value():
        return False
    if argument.name == "pin_memory":
        return not value
    if argument.name == "layout":
        return value in (None, torch.strided)
    if isinstance(value, torch.memory_format):  # the schema has its number
        return default == 0 and value is torch.contiguous_format
    if isinstance(default, list):
        return isinstance(value, list | tuple) and list(value) == default
    return type(value) is type(default) and repr(value) == repr(default)
