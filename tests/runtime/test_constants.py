"""What depends on no input and no parameter is computed once on each stage, and never sent."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parcompiler as pc
from parcompiler import runtime
from parcompiler.capture import capture
from parcompiler.capture.blocks import cut
from parcompiler.capture.clean import simplify
from parcompiler.prices import stage_costs
from tests.architectures import build
from tests.distributed.models import CLASSES, ROWS, WIDTH, XY, Stack


class Table(runtime.Stage):
    """A stage with a constant, as it is emitted."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequency", torch.ones(3))
        self.weight = nn.Parameter(torch.ones(3))
        self.count = 0

    def constants(self) -> tuple[Tensor, ...]:
        self.count += 1
        frequency: Tensor = self.get_buffer("frequency")
        return (frequency * 2,)

    def forward(self, x: Tensor) -> Tensor:
        (twice,) = self.once
        return x * twice * self.weight


def test_constants_are_computed_before_the_first_forward_alone() -> None:
    stage = Table()
    for _ in range(3):
        stage(torch.ones(3)).sum().backward()
    assert stage.count == 1
    assert not stage.once[0].requires_grad
    assert list(stage.state_dict()) == ["weight", "frequency"]


def test_a_buffer_that_is_loaded_changes_them() -> None:
    stage = Table()
    assert torch.equal(stage(torch.ones(3)), torch.full((3,), 2.0))
    stage.load_state_dict({"frequency": torch.full((3,), 5.0)}, strict=False)
    assert torch.equal(stage(torch.ones(3)), torch.full((3,), 10.0))
    assert stage.count == 2


def test_each_mode_has_its_own() -> None:
    class Doubling(Table):
        def constants(self) -> tuple[Tensor, ...]:
            return (torch.tensor(2.0 if self.training else 3.0),)

    stage, x = Doubling(), torch.ones(1)
    values = [stage.train(mode)(x)[0].item() for mode in (False, True, False, True)]
    assert values == [3.0, 2.0, 3.0, 2.0]


def test_constants_without_gradients_serve_training() -> None:
    stage = Table()
    with torch.inference_mode():
        stage(torch.ones(3))
    stage(torch.ones(3)).sum().backward()
    assert stage.count == 1


class OwnPositions(nn.Module):
    """A layer that makes its positions itself, and something of this micro-batch in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(WIDTH, dtype=x.dtype)
        seen = torch.zeros(ROWS, WIDTH, dtype=x.dtype)
        seen[:, :2] = x[:, :2]
        y: Tensor = self.linear(x)
        return y + places.cos() + seen


def emitted(program: pc.Program, folder: Path) -> Iterator[str]:
    program.export(folder, weights=False)
    for j in range(len(program.plan.stages or ())):
        yield (folder / f"stage_{j}.py").read_text(encoding="utf-8")


def test_equal_layers_share_a_constant(tmp_path: Path) -> None:
    torch.manual_seed(0)
    program = pc.compile(
        Stack(OwnPositions), pc.Mesh(pipeline=2), XY, microbatches=2, schedule="1f1b",
        stages=(2, 3),
    )  # fmt: skip
    forward = ""
    for text in emitted(program, tmp_path / "out"):
        before, _, after = text.partition("def constants(self)")
        method, _, forward = after.partition("def forward(")
        assert text.count("torch.cos(") == method.count("torch.cos(") == 1
        assert "torch.zeros(" in before  # it is written
        assert "(cos,) = self.once" in forward
    assert "for layer in self.layers" in forward  # the last two; the first has no gradient to give
    found = program.verify()
    assert max(found.loss_error, found.gradient_error) <= 1e-9, found.worst


class Slow(Stack):
    """A constant that takes longer to compute than to send."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        size = 256
        table = torch.arange(size * size, dtype=x.dtype).view(size, size).cos()
        for _ in range(4):
            table = (table @ table).tanh()
        for layer in self.layers:
            x = layer(x) + table[:ROWS, :WIDTH]
        return F.cross_entropy(self.head(x), labels)


def test_a_constant_is_never_sent_and_costs_memory_and_no_time() -> None:
    torch.manual_seed(0)
    program = pc.compile(Slow(), pc.Mesh(pipeline=2), XY, microbatches=2, schedule="1f1b")
    assert {value.shape for value in program.lowered.values.values()} == {(ROWS, WIDTH)}
    assert program.plan.sent == ()
    costs = stage_costs(program.problem, program.plan, program.lowered)
    graph = program.problem.graph
    for cost, stage in zip(costs, program.lowered.stages, strict=True):
        held = sum(program.problem.state_bytes(graph.by_name[name]) for name in stage.tensors)
        assert cost.resident >= held + 256 * 256 * 4
    priced = program.problem.under(program.plan)
    operators = {operation.name for cost in priced.costs for operation in cost.forward}
    assert not any("tanh" in name or "cos" in name for name in operators)
    assert "once" in program.report().to_text()
    found = program.verify()
    assert max(found.loss_error, found.gradient_error) <= 1e-9, found.worst


class Persistent(Stack):
    """A table that a checkpoint may change."""

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(CLASSES), persistent=persistent)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x) + self.get_buffer("table").cos(), labels)


@pytest.mark.parametrize("persistent", [False, True])
def test_what_a_state_dict_may_change_is_no_constant(persistent: bool) -> None:
    parts = cut(simplify(capture(Persistent(persistent), XY)), 1)
    assert bool(parts.constants) is not persistent


def test_rotary_tables_are_computed_by_no_micro_batch(tmp_path: Path) -> None:
    model, inputs, _ = build("mistral")
    program = pc.compile(model, pc.Mesh(pipeline=2), inputs, microbatches=2, schedule="1f1b")
    for text in emitted(program, tmp_path / "out"):
        _, _, forward = text.partition("class Stage")[2].partition("def forward(")
        assert "torch." not in forward
        assert "cos, sin = self.once" in forward
