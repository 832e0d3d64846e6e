"""What cannot be captured is refused with the module, the line and advice, and nothing printed."""

import re
import textwrap
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import parcompiler as pc
from parcompiler.capture import capture
from parcompiler.errors import CaptureError, InputError
from tests.distributed.models import CLASSES, WIDTH, XY, Remembering, Stack, rows


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        if x.sum() > 0:  # the values decide
            x = -x
        return x


def test_a_branch_on_values_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CaptureError) as error:
        capture(Stack(Branching), XY)
    text = str(error.value)
    assert "cannot capture Stack" in text
    assert "in module 'layers.0'" in text
    assert "test_errors.py:" in text
    assert "if x.sum() > 0:" in text
    assert "torch.where" in text
    out, err = capfd.readouterr()
    assert not out
    assert not err


def louder(x: torch.Tensor) -> torch.Tensor:
    return x if x.abs().max() > 1 else 2 * x


def test_the_line_of_a_function_that_a_module_calls_is_named_too() -> None:
    class Loud(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return louder(super().forward(input))

    with pytest.raises(CaptureError) as error:
        capture(Stack(lambda: Loud(WIDTH, WIDTH)), XY)
    lines = str(error.value).splitlines()
    assert lines[1].startswith("  in module 'layers.0', ")
    assert lines[1].endswith('"return louder(super().forward(input))"')
    assert lines[2].startswith(f"  there, {__file__}:")
    assert lines[2].endswith(': "return x if x.abs().max() > 1 else 2 * x"')


def test_a_generator_of_the_models_own_is_named() -> None:
    class Drawing(nn.Linear):
        generator = torch.Generator()

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            x = super().forward(input)
            return x + torch.randn(x.shape, generator=self.generator)

    message = r"an object that is not a tensor \(Generator\)"
    with pytest.raises(CaptureError, match=message):
        capture(Stack(lambda: Drawing(WIDTH, WIDTH)), XY)


def test_a_shape_that_values_decide_is_named() -> None:
    class Selecting(Stack):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            kept = self.layers[0](x)[labels > 1]
            if kept.shape[0] > 1:
                kept = kept[:1]
            total: torch.Tensor = kept.sum()
            return total

    with pytest.raises(CaptureError, match=r"(?s)the model itself.*values of tensors"):
        capture(Selecting(), XY)


GRID = torch.tensor([[1, 2], [2, 1]])


def test_the_way_out_for_sizes_of_images_is_one_that_works() -> None:
    class Seeing(Stack):
        def forward(
            self, x: torch.Tensor, labels: torch.Tensor, grid: torch.Tensor = GRID
        ) -> torch.Tensor:
            for i, size in enumerate(grid.prod(1).tolist()):
                x = x - x[i : i + size].mean() if size > 1 else x
            return super().forward(x, labels)

    with pytest.raises(CaptureError, match="If grid is the same in every step") as error:
        capture(Seeing(), {**XY, "grid": GRID})
    lines = str(error.value).split("alone:\n")[1].split("  What a model")[0]
    names: dict[str, Any] = {"torch": torch}
    exec(textwrap.dedent(lines), names)
    assert capture(names["Fixed"](Seeing()), XY).parameters
    with pytest.raises(CaptureError) as error:
        capture(Stack(Branching), XY)
    assert "the same in every step, make" not in str(error.value)


def test_an_error_of_the_model_is_shown_with_its_place() -> None:
    class Broken(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ x

    with pytest.raises(CaptureError, match=r"(?s)in module 'layers.0', .*return x @ x"):
        capture(Stack(Broken), XY)


def test_outputs_without_a_loss_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"no scalar loss \(a tensor of shape \(4, 8\)\)"):
        capture(nn.Linear(WIDTH, WIDTH), {"input": rows(WIDTH)})
    with pytest.raises(CaptureError, match="scalar tensor"):
        capture(nn.Linear(WIDTH, WIDTH), {"input": rows(WIDTH)}, loss=lambda y: y)


def test_lists_in_place_of_tensors_are_named() -> None:
    for inputs, given in (
        ([[1.0, 2.0], [3.0, 4.0]], "lists of numbers at '0', '1' given"),
        ({"x": [[1.0, 2.0]], "labels": (1, 2)}, "lists of numbers at 'x', 'labels' given"),
        ([1, 2], "numbers given"),
    ):
        with pytest.raises(InputError, match=re.escape(f"inputs need tensors ({given}): torch")):
            capture(Stack(), inputs)
    with pytest.raises(CaptureError, match="Stack fails on these inputs: TypeError") as error:
        capture(Stack(), {**XY, "labels": XY["labels"].tolist()})
    assert "lists of numbers, which the model gets as lists: 'labels'; where" in str(error.value)
    assert "without the compiler" not in str(error.value)


def test_a_way_that_is_taken_by_chance_is_named() -> None:
    class Adapter(nn.Module):  # as LoHa and LoKr of peft
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.module_dropout = nn.Linear(WIDTH, WIDTH), 0.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if (not self.training) or (self.training and torch.rand(1) > self.module_dropout):
                x = x + self.inner(x)
            return x

    class Chance(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if torch.rand(1) > 0.5 else -x

    with pytest.raises(CaptureError, match="takes the same way in every step: choose one"):
        capture(Stack(Chance), XY)
    model = Stack(Adapter)
    with pytest.raises(CaptureError, match="put the adapters into evaluation mode") as error:
        capture(model, XY)
    exec(textwrap.dedent(str(error.value).split("compiling:\n")[1]), {"model": model})
    assert capture(model, XY).parameters


def test_inputs_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InputError, match="labels"):
        capture(Stack(), {"x": rows(WIDTH)})
    with pytest.raises(InputError, match="dict of keyword arguments"):
        capture(Stack(), 3)  # type: ignore[arg-type]


class Neighbours(nn.Module):
    """A graph convolution, whose graph is an input, a buffer or an attribute."""

    def __init__(self, graph: torch.Tensor | None = None, *, is_buffer: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        if is_buffer:
            self.register_buffer("graph", graph)
        else:
            self.graph = graph

    def forward(self, x: torch.Tensor, graph: torch.Tensor | None = None) -> torch.Tensor:
        edges = self.graph if graph is None else graph
        assert isinstance(edges, torch.Tensor)
        loss: torch.Tensor = torch.sparse.mm(edges, self.linear(x)).square().mean()
        return loss


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
def test_sparse_tensors_are_refused_by_name() -> None:
    x, graph = torch.randn(2, WIDTH), torch.eye(2).to_sparse()
    of_rows = "has the layout torch.sparse_csr: make it dense"
    with pytest.raises(InputError, match=r"the input 'graph' has the layout torch.sparse_coo: "):
        capture(Neighbours(), {"x": x, "graph": graph})
    with pytest.raises(InputError, match=f"the input 'graph' {of_rows}"):
        capture(Neighbours(), {"x": x, "graph": graph.to_sparse_csr()})
    with pytest.raises(InputError, match=f"'graph' of Neighbours {of_rows}"):
        capture(Neighbours(graph.to_sparse_csr(), is_buffer=True), {"x": x})
    with pytest.raises(InputError, match=r"'graph' of Neighbours has the layout torch.sparse_coo"):
        capture(Neighbours(graph), {"x": x})


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_refused_by_name(layout: torch.layout) -> None:
    rows = torch.nested.nested_tensor([torch.ones(2, WIDTH), torch.ones(3, WIDTH)], layout=layout)
    with pytest.raises(InputError, match="the input '0' is a nested tensor: pad it"):
        capture(nn.Linear(WIDTH, WIDTH), (rows,), loss=lambda y: y.values().sum())


def test_tensors_of_tensors_are_refused_by_name() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    model = nn.Linear(WIDTH, WIDTH)
    pieces = TwoTensor(model.weight.detach(), model.weight.detach())
    model.weight = nn.Parameter(pieces)  # as fully_shard has DTensors
    with pytest.raises(
        InputError, match="'weight' of Linear is a TwoTensor, which is made of other tensors"
    ):
        capture(model, (rows(WIDTH),), loss=torch.sum)


def test_arrays_are_refused_by_name() -> None:
    numpy = pytest.importorskip("numpy")
    for array in (numpy.ones(2), numpy.float32(1)):
        with pytest.raises(InputError, match=r"the input '0' is a numpy\.(ndarray|float32): give"):
            capture(nn.Linear(WIDTH, WIDTH), (array,))


def test_two_inputs_of_one_key_are_refused() -> None:
    class Sum(nn.Module):
        def forward(self, d: dict[str, Any]) -> Any:
            return (d["a.b"] + d["a"]["b"]).sum()

    inputs = {"d": {"a.b": rows(WIDTH), "a": {"b": rows(WIDTH)}}}
    with pytest.raises(InputError, match=r"two inputs are 'd\.a\.b' \(keys are joined by dots\)"):
        capture(Sum(), inputs)


def test_a_lazy_module_is_captured_after_its_first_forward() -> None:
    model = nn.Sequential(nn.LazyLinear(WIDTH), nn.LazyBatchNorm1d())
    x = rows(WIDTH)
    with pytest.raises(InputError, match=r"'0\.weight' of Sequential has no shape yet: call"):
        capture(model, (x,), lambda out: out.square().mean())
    model(x)
    graph = capture(model, (x,), lambda out: out.square().mean())
    assert {"0.weight", "1.running_mean"} <= {*graph.by_name}


def test_the_model_is_left_as_it_is() -> None:
    model = Remembering()
    before = dict(vars(model))
    capture(model, XY)
    assert vars(model) == before
    assert not hasattr(model, "last")


def test_a_forward_that_exchanges_modules_leaves_the_model_alone() -> None:
    class Exchanging(Stack):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            if not isinstance(self.head, nn.Sequential):
                unused = nn.Linear(WIDTH, WIDTH)
                self.head = nn.Sequential(self.head, nn.Tanh())  # type: ignore[assignment]
                del unused
            return F.cross_entropy(self.head(self.layers[0](x)), labels)

    model = Exchanging()
    graph = capture(model, XY)
    assert isinstance(model.head, nn.Linear)
    assert not graph.random  # the weights of what it made and dropped are not drawn
    assert {"head.weight", "head.bias"} <= set(graph.tensors)


class Unusual(nn.Module):
    """Calls itself something other than self."""

    def forward(me, x: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportSelfClsParameterName]
        return x.sum() if x.sum() > 0 else -x.sum()


def test_the_place_is_found_whatever_a_module_calls_itself() -> None:
    with pytest.raises(CaptureError, match=r"the model itself.*if x.sum\(\) > 0"):
        capture(Unusual(), (torch.zeros(2),))


class TwoNames(nn.Module):
    """Has one module under two names, for which torch runs proxies of all."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Unusual()
        self.again = self.first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.again(x)
        return y


def test_the_place_is_found_where_a_module_has_two_names() -> None:
    with pytest.raises(CaptureError, match=r"in module 'first'.*if x.sum\(\) > 0"):
        capture(TwoNames(), (torch.zeros(2),))


class Detached(Stack):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return super().forward(x, labels).detach()


class Correct(Stack):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        correct: torch.Tensor = self.head(self.layers[0](x)).argmax(-1) == labels
        return correct.sum()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Detached(), r"no gradient \(detached.*; 10 parameters.*return super\(\)\.forward"),
        (Correct(), r"no gradient \(it is torch.int64"),
        (Stack().requires_grad_(False), "no parameter is trained: all have requires_grad=False"),
    ],
)
def test_a_loss_that_trains_nothing_is_refused(model: nn.Module, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        capture(model, XY)


class Positioned(Stack):
    """Layers on positions of the rows, and on rows of a table by class."""

    def __init__(self, positions: int) -> None:
        super().__init__()
        self.position = nn.Embedding(positions, WIDTH)
        self.bag = nn.EmbeddingBag(CLASSES, WIDTH)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = x + self.position(torch.arange(len(x), device=x.device)) + self.bag(labels[:, None])
        return super().forward(x, labels)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_positions_beyond_the_table_are_refused(device: str) -> None:
    inputs = {key: value.to(device) for key, value in XY.items()}
    capture(Positioned(4).to(device), inputs)
    message = r"position.weight has 3 rows \(0 to 2\), and is asked for rows 0 to 3.*'position'"
    with pytest.raises(InputError, match=message):
        capture(Positioned(3).to(device), inputs)


def test_many_positions_beyond_the_table_are_refused() -> None:
    rows = 3 << 20
    inputs = {key: x.new_empty(rows, *x.shape[1:], device="meta") for key, x in XY.items()}
    with pytest.raises(InputError, match=rf"is asked for rows 0 to {rows - 1}"):
        capture(Positioned(4).to("meta"), inputs)


def test_inputs_beyond_the_table_are_refused() -> None:
    labels = XY["labels"].clone()
    labels[0] = CLASSES
    with pytest.raises(InputError, match=rf"bag.weight has {CLASSES} rows"):
        capture(Positioned(4), {"x": XY["x"], "labels": labels})


class Wrong(Stack):
    """Fails by itself, in a layer, and changes its buffer before that."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__(lambda: nn.Linear(WIDTH, WIDTH + 1))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x + torch.rand(()), labels)


def test_a_model_that_fails_by_itself_is_told_from_one_that_cannot_be_captured() -> None:
    model, random = Wrong(), torch.get_rng_state()
    with pytest.raises(CaptureError, match="Wrong fails on these inputs: RuntimeError") as error:
        capture(model, XY)
    assert "fails so without the compiler, too" in str(error.value)
    assert isinstance(error.value.__cause__, RuntimeError)
    assert not model.calls
    assert torch.equal(random, torch.get_rng_state())
    with pytest.raises(CaptureError, match="cannot capture Unexported") as error:
        capture(Unexported(), XY)
    assert "torch.export cannot trace" in str(error.value)


class Unexported(Stack):
    """Runs, and reads the memory of its input, which a traced one does not have."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return super().forward(x + (x.data_ptr() % 1), labels) * float(x.numpy().size)


def test_a_forward_that_asks_for_gradients_says_what_to_do() -> None:
    class Sloped(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            x = input.detach().requires_grad_()
            (slope,) = torch.autograd.grad(super().forward(x).sin().sum(), x, create_graph=True)
            return slope

    with pytest.raises(CaptureError, match=r"asks for gradients itself .* write the derivative"):
        capture(Stack(lambda: Sloped(WIDTH, WIDTH)), XY)


def test_packed_sequences_say_what_to_do() -> None:
    class Packing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.GRU(WIDTH, WIDTH, batch_first=True)

        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
            y, _ = nn.utils.rnn.pad_packed_sequence(self.layer(packed)[0], batch_first=True)
            return y.square().mean()

    inputs = {"x": torch.randn(2, 5, WIDTH), "lengths": torch.tensor([5, 3])}
    with pytest.raises(CaptureError, match="padded rows, and mask"):
        capture(Packing(), inputs)


def test_a_batch_norm_that_averages_over_all_batches_says_what_to_do() -> None:
    model = Stack(lambda: nn.BatchNorm1d(WIDTH, momentum=None))
    with pytest.raises(CaptureError, match=r"momentum=None .* give it a momentum"):
        capture(model, XY)


@pytest.mark.parametrize("function", [torch.heaviside, torch.floor_divide])
def test_an_operator_without_a_derivative_is_named_when_gradients_need_it(function: Any) -> None:
    class Stepping(Stack):
        def __init__(self, *, detached: bool) -> None:
            super().__init__()
            self.detached = detached

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            y = self.layers[0](x)
            y = y * function(y.detach() if self.detached else y, torch.ones_like(y))
            total: torch.Tensor = (self.layers[1](y) * labels.sum()).mean()
            return total

    name = function.__name__
    with pytest.raises(CaptureError, match=rf"no derivative of '{name}'.*detach.*test_errors"):
        pc.compile(Stepping(detached=False), pc.Mesh(), XY)
    pc.compile(Stepping(detached=True), pc.Mesh(), XY)


class Tied(nn.Module):
    """A head with the numbers of the embedding: in its memory, or in memory of its own."""

    def __init__(self, *, copied: bool) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES, bias=False)
        data = self.table.weight.data
        self.head.weight.data = data.clone() if copied else data

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.head(self.table(x)).square().mean()
        return loss


def test_parameters_in_one_memory_are_refused() -> None:
    inputs = {"x": torch.zeros(4, 2, dtype=torch.long)}
    with pytest.raises(InputError, match=r"'head\.weight' of Tied lie in the same memory"):
        capture(Tied(copied=False), inputs)
    capture(Tied(copied=True), inputs)


def test_rows_of_one_tensor_are_parameters_of_their_own() -> None:
    layer = nn.LSTM(WIDTH, WIDTH, batch_first=True)
    whole = torch.cat([p.detach().flatten() for p in layer.parameters()])
    parts = whole.split([p.numel() for p in layer.parameters()])
    for parameter, part in zip(layer.parameters(), parts, strict=True):
        parameter.data = part.view_as(parameter)  # as its kernels on a GPU want them
    model = nn.Sequential(layer)
    capture(model, (torch.randn(2, 3, WIDTH),), loss=lambda output: output[0].square().mean())


def test_a_scripted_module_is_refused() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    with pytest.warns((DeprecationWarning, FutureWarning)):  # before and from torch 2.14
        model[0] = torch.jit.script(model[0])
    with pytest.raises(CaptureError, match=r"'0' of Sequential is a torch.jit.ScriptModule"):
        capture(model, (torch.randn(2, WIDTH),), loss=torch.sum)
