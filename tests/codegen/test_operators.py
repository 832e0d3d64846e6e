"""Every spelling is the operator that it stands for: same text, same value, same gradient."""

import ast
import math
import operator
import types
from collections.abc import Callable, Iterator, Mapping
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from parcompiler.capture.effects import is_statement
from parcompiler.codegen.literals import literal
from parcompiler.codegen.operators import SPECIALS, expression
from parcompiler.codegen.spellings import SPELLINGS, SWITCHES, Spelling
from parcompiler.errors import InputError
from tests.codegen.operator_cases import CASES

aten = torch.ops.aten
Values = Mapping[str, Tensor]

# Eager calls that reach ATen by another way than the node, to the same value and gradient
OTHER_WAYS = {
    "contiguous": [],  # already is
    "item": [],
    "sym_size": [],
    "slice": ["alias"],  # of everything
    "lift_fresh_copy": ["clone"],
    "bitwise_and": ["__and__"],
    "bitwise_or": ["__or__"],
    "bitwise_xor": ["__xor__"],
}


@cache
def tensors() -> Values:
    """The operands of the calls, by name."""
    generator = torch.Generator().manual_seed(0)

    def real(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator) * 1.6 - 0.8

    def share(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator) * 0.8 + 0.1

    def whole(low: int, high: int) -> Tensor:
        return torch.randint(low, high, (4, 6), generator=generator)

    values = {name: real(4, 6) for name in ("x", "y")} | {name: share(4, 6) for name in ("p", "p1")}
    values |= {"z": real(2, 4, 6), "z1": real(2, 6, 5), "z2": real(2, 4, 5), "z3": real(4, 5)}
    values |= {"b": real(6, 5), "b1": real(5, 3), "c": real(4), "c1": real(4, 1), "w": share(6)}
    values |= {"s": torch.tensor(0.5), "s0": torch.tensor(1), "mask": share(4, 6) > 0.5}
    values |= {"ids": whole(0, 4), "ids1": whole(1, 4), "e": torch.empty(0), "cw": share(6)}
    values |= {"i": torch.tensor([0, 3, 1, 2]), "i1": torch.tensor([0, 1]), "bias": real(5)}
    values |= {"w4": share(4), "m4": share(4), "v4": share(4), "bias6": real(6), "w6": real(6, 6)}
    values |= {"pairs": real(3, 2), "spectrum": torch.view_as_complex(real(3, 2))}
    values |= {"image": real(2, 4, 8, 8), "kernel": real(6, 4, 3, 3), "patches": real(2, 16, 16)}
    values |= {"signal": real(2, 4, 10), "kernel1": real(6, 4, 3), "kernelt1": real(4, 3, 3)}
    values |= {"volume": real(2, 2, 4, 4, 4), "kernel3": real(3, 2, 3, 3, 3)}
    values |= {"kernelt2": real(4, 3, 3, 3), "kernelt3": real(2, 3, 3, 3, 3)}
    values |= {name: real(2, 4, 5, 8) for name in "qkv"} | {"am": share(5, 5) > 0.3}
    values |= {"kg": real(2, 2, 5, 8), "vg": real(2, 2, 5, 8), "sorted_w": torch.linspace(-1, 1, 5)}
    values |= {"h": real(1, 2, 3), "wih": real(12, 6), "whh": real(12, 3), "gih": real(9, 6)}
    values |= {"ghh": real(9, 3), "rih": real(3, 6), "rhh": real(3, 3)}
    return values


BUFFERS = {"m4", "v4", "cw"}  # no gradients


class Operator:
    """Calling it adds a node to the graph."""

    def __init__(self, graph: fx.Graph, target: object) -> None:
        self.graph = graph
        self.target = target

    def __getattr__(self, overload: str) -> "Operator":
        return Operator(self.graph, getattr(self.target, overload))

    def __call__(self, *args: object, **kwargs: object) -> fx.Node:
        target = self.target
        if isinstance(target, torch._ops.OpOverloadPacket):
            target = target.default
        return self.graph.call_function(target, args, kwargs)  # type: ignore[arg-type]


class Names(dict[str, object]):
    """What a call may name: the tensors, some constants, and else the operators of ATen."""

    def __init__(self, values: Values) -> None:
        super().__init__(torch=torch, cpu=torch.device("cpu"), MAX=2**63 - 1)
        self.update(inf=math.inf, nan=math.nan)
        self.graph = fx.Graph()
        self.tensors = values

    def __missing__(self, name: str) -> object:
        if name not in self.tensors:
            return Operator(self.graph, getattr(aten, name))
        return self.placeholder(name, val=self.tensors[name])

    def placeholder(self, name: str, **meta: object) -> fx.Node:
        """A node for a tensor, or for what else `meta` says."""
        node = self.graph.create_node("placeholder", name, name=f"v_{name}")
        node.meta.update(meta)
        self[name] = node
        return node


def node_of(call: str) -> fx.Node:
    """The node of a call such as `softmax.int(x, -1)`."""
    node = eval(call, {}, Names(tensors()))
    assert isinstance(node, fx.Node)
    return node


def operand(node: fx.Node) -> str:
    return str(node.target)


def call_node(node: fx.Node, values: Values) -> object:
    """What a node yields of these tensors."""
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: values[operand(n)])
    return node.target(*args, **kwargs)  # type: ignore[operator]


def evaluate(text: str, values: Values, *, training: bool = True) -> object:
    """What the text yields, in an emitted file."""
    module = types.SimpleNamespace(training=training)
    names = {"torch": torch, "F": F, "DEVICE": torch.device("cpu"), "self": module}
    return eval(text, names, values)


def flat(value: object) -> Iterator[object]:
    if isinstance(value, list | tuple):
        for item in value:
            yield from flat(item)
    else:
        yield value


def outcome(compute: Callable[[Values], object], names: list[str]) -> list[object]:
    """All that a computation yields, changes and sends back, as bytes."""
    torch.manual_seed(0)
    leaves = {name: tensors()[name].clone() for name in names}
    for name in leaves.keys() - BUFFERS:
        leaves[name].requires_grad_(leaves[name].is_floating_point() or leaves[name].is_complex())
    values = {name: leaf.clone() for name, leaf in leaves.items()}
    results = [*flat(compute(values)), *values.values()]
    total = torch.zeros((), dtype=torch.float64)
    for result in results:
        if isinstance(result, Tensor) and result.requires_grad:
            numbers = torch.view_as_real(result.resolve_conj()) if result.is_complex() else result
            weights = torch.linspace(0.5, 1.5, numbers.numel(), dtype=torch.float64)
            total = total + (numbers.double().reshape(-1) * weights).nansum()
    if total.requires_grad:
        total.backward()
    return [exact(item) for item in [*results, *(leaf.grad for leaf in leaves.values())]]


def exact(value: object) -> object:
    if not isinstance(value, Tensor):
        return value
    value = value.detach()
    numbers = value.to_dense() if value.is_sparse else value
    data = numbers.resolve_conj().resolve_neg().numpy().tobytes()
    return value.dtype, value.shape, value.is_sparse or value.stride(), data


@pytest.mark.parametrize("call", CASES)
def test_an_operator_is_written_as_people_write_it(call: str) -> None:
    assert expression(node_of(call), operand) == CASES[call]


@pytest.mark.parametrize("call", CASES)
def test_a_spelling_has_the_value_and_the_gradient_of_its_operator(call: str) -> None:
    node = node_of(call)
    names = [operand(item) for item in node.all_input_nodes]
    text = expression(node, operand)
    expected = outcome(lambda values: call_node(node, values), names)
    assert outcome(lambda values: evaluate(text, values), names) == expected


@pytest.mark.parametrize("call", CASES)
def test_a_spelling_calls_its_operator_and_no_other(call: str) -> None:
    node = node_of(call)
    names = [operand(item) for item in node.all_input_nodes]
    text = expression(node, operand)

    def compute(*values: Tensor) -> object:
        return evaluate(text, dict(zip(names, values, strict=True)))

    if "item" in text:
        pytest.skip("the value of a tensor is not known while tracing")
    traced = make_fx(compute, pre_dispatch=True)(*(tensors()[name].clone() for name in names))
    called = [
        item.target._schema.name.removeprefix("aten::")
        for item in traced.graph.nodes
        if isinstance(item.target, torch._ops.OpOverload)
    ]
    name = str(node.target).split(".")[1]
    # The losses of torch.nn.functional broadcast what export has broadcast already.
    assert [n for n in called if n != "broadcast_tensors" or n == name] in (
        [name],
        OTHER_WAYS.get(name),
    )


def test_every_spelling_has_a_case_and_names_arguments_of_its_operators() -> None:
    called = {str(node_of(call).target).removeprefix("aten.") for call in CASES}
    for text, operators in SPELLINGS.items():
        for item in operators.split():
            name, _, overload = item.partition(".")
            target = getattr(getattr(aten, name), overload or "default")
            arguments = {argument.name for argument in target._schema.arguments} | {"from_"}
            assert Spelling(text.replace("{op}", name)).names - SWITCHES <= arguments, text
            assert f"{name}.{overload or 'default'}" in called, item
    assert SPECIALS.keys() <= called


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ("dropout(x, 0.5, True)", "x"),
        (
            "scaled_dot_product_attention(q, k, v, None, 0.5)",
            "F.scaled_dot_product_attention(q, k, v)",
        ),
        (
            "batch_norm(image, w4, w4, m4, v4, True, 0.1, 1e-05, True)",
            "F.batch_norm(image, m4, v4, w4, w4)",
        ),
        ("rrelu(x, 0.1, 0.3, True)", "F.rrelu(x, 0.1, 0.3)"),
    ],
)
def test_what_was_captured_in_training_evaluates_when_the_module_does(call: str, text: str) -> None:
    found = evaluate(expression(node_of(call), operand), tensors(), training=False)
    assert exact(found) == exact(evaluate(text, tensors()))


def test_a_norm_without_statistics_normalises_by_the_batch_in_evaluation_too() -> None:
    for norm in ("batch_norm", "instance_norm"):
        call = f"{norm}(image, None, None, None, None, True, 0.1, 1e-05, True)"
        text = expression(node_of(call), operand)
        assert text == f"F.{norm}(image, None, None, None, None, True, 0.1, 1e-05)"


@pytest.mark.parametrize("device", ["cpu", "meta", "cuda:1"])
def test_no_captured_device_survives(device: str) -> None:
    names = Names(tensors())
    names["there"] = torch.device(device)
    for call, text in {
        "zeros([2], device=there)": "torch.zeros((2,), device=DEVICE)",
        "ones_like(x, device=there)": "torch.ones_like(x, device=DEVICE)",
        "new_zeros(x, [2], device=there)": "x.new_zeros((2,), device=DEVICE)",
        "to.device(x, there, torch.bool)": "x.to(DEVICE, torch.bool)",
        "_to_copy(x, device=there)": "torch.ops.aten._to_copy.default(x, device=DEVICE)",
        "hann_window(4, device=there)": "torch.ops.aten.hann_window.default(4, device=DEVICE)",
        "hann_window(4)": "torch.ops.aten.hann_window.default(4, device=DEVICE)",
    }.items():
        assert expression(eval(call, {}, names), operand) == text


def test_a_number_where_a_tensor_could_be_is_written_only_where_python_takes_it() -> None:
    names = Names(tensors())
    names.placeholder("n", val=3)
    for call, text in {
        "mul.Tensor(x, n)": "x * n",
        "mul.Tensor(n, x)": "torch.ops.aten.mul.Tensor(n, x)",
        "mul.Scalar(x, s)": "torch.ops.aten.mul.Scalar(x, s)",
        "maximum(x, 2)": "torch.ops.aten.maximum.default(x, 2)",
        "view(x, [n, -1])": "x.view(n, -1)",
        "reshape(x, [n, n])": "x.reshape(n, n)",
        "zeros([n, 2])": "torch.zeros([n, 2], device=DEVICE)",
        "select.int(x, 0, n)": "x[n]",
        "slice.Tensor(x, 1, 0, n)": "x[:, :n]",
    }.items():
        assert expression(eval(call, {}, names), operand) == text


def test_without_example_values_what_depends_on_the_rank_is_safe() -> None:
    names = Names({})
    names.placeholder("x")
    names.placeholder("i")
    for call, text in {
        "select.int(x, 2, 0)": "x[:, :, 0]",
        "select.int(x, -1, 0)": "x[..., 0]",
        "slice.Tensor(x, -2, 1, 2)": "x[..., 1:2, :]",
        "index.Tensor(x, [i])": "torch.ops.aten.index.Tensor(x, [i])",
    }.items():
        assert expression(eval(call, {}, names), operand) == text


def test_an_overload_named_by_a_word_of_python_can_be_called() -> None:
    names = Names(tensors())
    node = names.graph.call_function(getattr(aten.random, "from"), (names.placeholder("x"), 0, 3))
    text = expression(node, operand)
    assert text == 'getattr(torch.ops.aten.random, "from")(x, 0, 3)'
    assert isinstance(evaluate(text, {"x": torch.zeros(2)}), Tensor)


def test_lists_and_sizes_are_computed_by_the_operators_of_python() -> None:
    graph = fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    assert expression(graph.call_function(operator.getitem, (a, 0)), operand) == "a[0]"
    assert expression(graph.call_function(operator.mul, (a, -2)), operand) == "a * -2"
    assert expression(graph.call_function(operator.floordiv, (a, b)), operand) == "a // b"
    assert expression(graph.call_function(operator.neg, (a,)), operand) == "-a"
    with pytest.raises(InputError, match="no ATen operator"):
        expression(graph.call_function(math.sqrt, (a,)), operand)


def test_a_statement_is_what_nobody_reads_and_has_an_effect() -> None:
    names = Names(tensors())
    update, copy = eval("add_.Tensor(x, 1), copy_(x, y)", {}, names)
    unused, check = eval("neg(x), _assert_tensor_metadata(x)", {}, names)
    assert is_statement(update) and is_statement(copy) and is_statement(check)
    assert not is_statement(unused)
    names.graph.call_function(aten.neg.default, (update,))
    assert not is_statement(update)


@given(st.text())
def test_a_string_stays_data(hostile: str) -> None:
    names = Names({"x": tensors()["x"]})
    names["hostile"] = hostile
    text = expression(eval("pad(x, [0, 1], hostile)", {}, names), operand)
    assert text.isprintable()
    tree = ast.parse(text, mode="eval").body
    assert isinstance(tree, ast.Call)
    assert [ast.literal_eval(item.value) for item in tree.keywords] in ([hostile], [])


@given(st.none() | st.booleans() | st.integers() | st.floats() | st.complex_numbers() | st.text())
def test_a_constant_evaluates_to_itself(value: object) -> None:
    assert repr(eval(literal(value))) == repr(value)
    assert repr(eval(literal([value, value]))) == repr((value, value))


def test_what_has_no_source_is_refused() -> None:
    with pytest.raises(InputError, match="a Generator cannot be written as Python source"):
        literal(torch.Generator())
