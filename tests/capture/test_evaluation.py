"""One graph computes as either mode of a model does."""

import linecache
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import parcompiler as pc
from parcompiler.capture import capture
from parcompiler.capture.evaluation import BY_MODE
from parcompiler.capture.known import Known

X = (torch.ones(4, 8),)


class Model(nn.Module):
    """Three layers, each after `change(self, x)`."""

    def __init__(self, change: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.change, self.drop = change, 0.1

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(self.change(self, x))
        return x.square().mean()


def scaled(model: nn.Module, x: Tensor) -> Tensor:
    return x * torch.rand(len(x), 1) if model.training else x


def sliced(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone()
    if model.training:
        x[:, 0] += torch.rand(len(x))
    x[:, 1] += 1
    return x


def asks(model: nn.Module, x: Tensor) -> Tensor:
    while not model.training and x.sum() > 1e9:
        x = x / 2
    return x * torch.rand(4, 1)


def noisy_evaluation(model: nn.Module, x: Tensor) -> Tensor:
    if not model.training:
        return x + torch.randn(4, 1)
    return x * torch.rand(4, 1)


def elsewhere(model: nn.Module, x: Tensor) -> Tensor:
    if model.training:
        return x * torch.rand(4, 1)
    for _ in range(20):
        x = x.sin()
    return x


def test_a_graph_chooses_once_where_the_modes_meet() -> None:
    graph = capture(Model(scaled), X)
    choices = [node for node in graph.fx_graph.nodes if node.target is BY_MODE]
    assert [[str(operand) for operand in node.all_input_nodes] for node in choices] == [
        ["mul", "args_0"], ["mul_1", "linear"], ["mul_2", "linear_1"]
    ]  # fmt: skip
    assert [user.target for node in choices for user in node.users] == [
        torch.ops.aten.linear.default
    ] * 3
    assert not graph.modes.unfollowed
    # Nothing of an evaluation is in the graph of a model in evaluation mode, and nothing else.
    frozen = capture(Model(scaled).eval(), X)
    assert [str(node) for node in frozen.fx_graph.nodes if node.op == "call_function"] == [
        "linear", "linear_1", "linear_2", "square", "mean"
    ]  # fmt: skip


def numbers(model: nn.Module, x: Tensor) -> Tensor:
    if model.training:
        x = x * torch.tensor(2.0) * torch.rand(4, 1)
    return x * torch.tensor(3.0) + torch.tensor(0.5 if model.training else 4.0)


def test_modes_share_the_constants_that_are_equal() -> None:
    graph = capture(Model(numbers), X)
    values = [t.item() for n, t in graph.tensors.items() if n.startswith("lifted")]
    assert values == [2.0, 3.0, 0.5] * 3 + [4.0] * 3
    assert not graph.modes.unfollowed


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (sliced, "the modes differ in shapes, or in what they wrote"),
        (asks, "in evaluation mode: cannot capture Model"),
        (noisy_evaluation, "evaluations alone draw"),
        (elsewhere, "evaluations add 60 operators"),
    ],
)
def test_branches_that_cannot_be_followed_are_told(
    change: Callable[[nn.Module, Tensor], Tensor], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Model(change)
    alone = capture(Model(change).eval(), X) if change is sliced else None
    program = pc.compile(model, pc.Mesh(), X, microbatches=1, progress=False)
    said = capsys.readouterr().err
    assert "evaluations and predictions take the branches on self.training" in said
    assert why in said
    assert not any(node.target is BY_MODE for node in program.captured.fx_graph.nodes)
    assert all(module.training for module in model.modules())
    assert alone is None or not alone.modes.unfollowed


def both(model: nn.Module, x: Tensor) -> Tensor:
    if model.training:
        noise = torch.rand(4, 1)
        x = x * noise
    else:
        x = x.tanh().exp()
    return x


def test_emitted_code_runs_the_branch_of_its_mode(tmp_path: Path) -> None:
    program = pc.compile(Model(both), pc.Mesh(), X, microbatches=1, progress=False)
    (stage,) = program.export(tmp_path / "out").rglob("stage_0.py")
    text = stage.read_text(encoding="utf-8")
    lines = """
        if not self.training:
            tanh = torch.tanh(linear)
            exp = torch.exp(tanh)
        if self.training:
            rand = torch.rand((4, 1), device=DEVICE)
            product = linear * rand
        product = product if self.training else exp
    """
    assert lines.strip() in text


class Dropping(nn.Module):
    """Branches on the mode for dropout, as attention in transformers does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(8, 8), 0.1

    def forward(self, x: Tensor) -> Tensor:
        p = self.dropout if self.training else 0.0
        return nn.functional.dropout(self.linear(x), p, self.training).mean()


def test_dropout_needs_no_second_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    traces: list[Known] = []
    entered: Callable[[Known], object] = Known.__enter__

    def counted(known: Known) -> object:
        traces.append(known)
        return entered(known)

    monkeypatch.setattr(Known, "__enter__", counted)
    capture(Dropping(), X)
    assert len(traces) == 1
    capture(Model(scaled), X)
    assert len(traces) == 3


class Passing(Dropping):
    """Passes the mode on, to a function that draws nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return times(self.linear(x), self.training).mean()


def times(x: Tensor, training: bool) -> Tensor:
    return 2 * x if training else x


class Naming(Dropping):
    """Keeps the mode in a variable."""

    def forward(self, x: Tensor) -> Tensor:
        doubled = self.training and self.dropout > 0
        return times(self.linear(x), doubled).mean()


class DroppingMore(Dropping):
    """Does more than drop in training."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            x = 2 * nn.functional.dropout(x, self.dropout)
        y: Tensor = self.linear(x)
        return y.mean()


@pytest.mark.parametrize("kind", [Passing, Naming, DroppingMore])
def test_any_use_of_the_mode_is_noticed(kind: type[Dropping]) -> None:
    graph = capture(kind(), X).fx_graph
    assert sum(node.target is BY_MODE for node in graph.nodes) == 1


def test_a_class_of_a_notebook_has_its_source_in_its_methods() -> None:
    cell = """
class InACell(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x):
        loss = self.linear(x).mean()
        return loss + self.linear.weight.square().sum() if self.training else loss
"""
    lines = list[str](cell.splitlines(keepends=True))
    linecache.cache["<cell 1>"] = len(cell), None, lines, "<cell 1>"
    space: dict[str, Any] = {"torch": torch, "__name__": "a notebook"}
    exec(compile(cell, "<cell 1>", "exec"), space)
    graph = capture(space["InACell"](), X).fx_graph
    assert sum(node.target is BY_MODE for node in graph.nodes) == 1
