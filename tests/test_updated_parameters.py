"""Parameters that a forward itself updates: copies of them do not drift apart in silence."""

from typing import Any

import pytest
import torch
from torch import nn

import parcompiler as pc


class Renormed(nn.Module):
    """A table whose rows the forward shortens as it reads them, by the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(8, 4, max_norm=1.0), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.table(x))
        return y.square().mean()


class Bounded(nn.Module):
    """A trained weight that is kept positive, and a frozen one that follows it."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Linear(4, 4)
        self.teacher = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.student.weight.clamp_(min=0)
            self.teacher.weight.lerp_(self.student.weight, 0.1)
        y: torch.Tensor = self.student(x) - self.teacher(x)
        return y.square().mean()


TOKENS = {"x": torch.arange(8).reshape(4, 2)}
NUMBERS = {"x": torch.randn(4, 4)}


def compiled(model: nn.Module, mesh: pc.Mesh | pc.Cluster, **options: Any) -> pc.Program:
    inputs = TOKENS if isinstance(model, Renormed) else NUMBERS
    return pc.compile(model, mesh, inputs, microbatches=2, progress=False, **options)


@pytest.mark.parametrize(
    ("model", "mesh", "options", "message"),
    [
        (Renormed(), pc.Mesh(data=2), {}, r"'table\.weight', and data ranks.*drift apart.*data=1"),
        (Renormed(), pc.Mesh(data=2), {"zero": 3}, r"data ranks .*: take one data rank \(data=1\)"),
        (Renormed(), pc.Mesh(context=2), {}, r"context ranks .*: take one .* \(context=1\)"),
        (Renormed(), pc.Mesh(data=2, context=2), {}, r"and one context rank \(data=1, context=1\)"),
        (Renormed(), pc.Mesh(), {"precision": "bf16"}, "keeps a float32 master of it"),
        (Bounded(), pc.Mesh(data=2), {"zero": 3}, "zero=3 shares it out: take zero=0"),
    ],
    ids=["data", "shared", "context", "both", "master", "zero"],
)
def test_copies_that_would_drift_apart_are_refused(
    model: nn.Module, mesh: pc.Mesh, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(pc.InputError, match=rf"the forward updates the parameter .*{message}"):
        compiled(model, mesh, **options)


def test_a_search_takes_a_mesh_on_which_they_do_not() -> None:
    program = compiled(Renormed(), pc.Cluster(devices_per_node=2))
    assert program.plan.mesh.data == 1


def test_updates_that_are_the_same_everywhere_are_not_refused() -> None:
    program = compiled(Bounded(), pc.Mesh(data=2))
    assert program.plan.zero == 0
    assert program.verify().ok


@pytest.mark.parametrize("model", [Renormed(), Bounded()], ids=["rows", "teacher"])
def test_an_evaluation_puts_them_back(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(0))
    program = compiled(model, pc.Mesh())
    inputs = {"x": (TOKENS if isinstance(model, Renormed) else NUMBERS)["x"].repeat(2, 1)}
    with program.worker() as worker:
        before = worker.gather_state_dict()
        worker.evaluate(inputs)
        after = worker.gather_state_dict()
        worker.step(inputs)
        trained = worker.gather_state_dict()
    assert before is not None
    assert after is not None
    assert trained is not None
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not all(torch.equal(before[name], trained[name]) for name in before)
