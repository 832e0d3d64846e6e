"""Context ranks sort their own rows where every reader takes them alike, and nowhere else."""

import re
from collections.abc import Callable
from importlib import import_module

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import parcompiler as pc
from parcompiler.spmd.sorting import rows_of
from tests import zoo

import_module("transformers.integrations.moe")  # registers the product, which takes float64
grouped: Callable[..., torch.Tensor] = torch.ops.transformers.grouped_mm_fallback
TOKENS, CHOICES, EXPERTS, WIDTH = 12, 2, 3, 8
Between = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Mixture(nn.Module):
    """Rows by expert, their product, what `between` makes of them, and back."""

    def __init__(self, between: Between, first: int = 0) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))
        self.between, self.first = between, first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.view(-1, WIDTH)
        scores, experts = self.gate(x).topk(CHOICES)
        sorted_experts, order = experts.flatten().sort()
        tokens = order // CHOICES
        ends = torch.histc(sorted_experts.float(), EXPERTS, 0, EXPERTS - 1).cumsum(
            0, dtype=torch.int32
        )
        rows = grouped(x[tokens], self.weight, ends)
        rows = self.between(rows, order, sorted_experts) * scores.reshape(-1)[order].unsqueeze(-1)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(self.first, self.first + len(order))
        inverse = inverse - self.first if self.first else inverse
        back: torch.Tensor = rows[inverse].view(TOKENS, CHOICES, WIDTH)
        return back.sum(1).square().mean()


class Added(Mixture):
    """The same, counted before the sort, and added to the tokens."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.view(-1, WIDTH)
        scores, experts = self.gate(x).topk(CHOICES)
        order = experts.flatten().argsort()
        tokens = order // CHOICES
        ends = torch.histc(experts.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0, dtype=torch.int32)
        rows = grouped(x[tokens], self.weight, ends) * scores.flatten()[order, None]
        rows = self.between(rows, order, ends)
        made: torch.Tensor = torch.zeros_like(x).index_add(0, tokens, rows).view(2, -1, WIDTH)
        return made.square().mean()


def is_sorted_by_ranks(model: nn.Module) -> bool:
    torch.manual_seed(0)
    inputs = torch.randn(2, TOKENS // 2, WIDTH)
    program = pc.compile(model, pc.Mesh(), (inputs,), microbatches=1, progress=False)
    rows = rows_of(program.problem.graph, "context")
    assert rows is not None
    return bool(rows.sorting)


@pytest.mark.parametrize(
    "between",
    [
        lambda rows, order, experts: F.silu(rows),
        lambda rows, order, experts: rows + torch.ones(EXPERTS, WIDTH)[experts],
        lambda rows, order, experts: rows.chunk(2, -1)[0].repeat(1, 2),
    ],
)
def test_what_treats_each_row_alone_is_sorted_by_each_rank(between: Between) -> None:
    assert is_sorted_by_ranks(Mixture(between))


@pytest.mark.parametrize(
    "between",
    [
        lambda rows, order, experts: rows - rows.mean(0),
        lambda rows, order, experts: rows * order.unsqueeze(-1),
        lambda rows, order, experts: rows * (order // 3).unsqueeze(-1),
        lambda rows, order, experts: rows.flip(0),
        lambda rows, order, experts: F.dropout(rows, 0.5),
        lambda rows, order, experts: rows + torch.ones(len(order), WIDTH),
    ],
)
def test_what_reads_other_rows_or_their_numbers_is_not(between: Between) -> None:
    assert not is_sorted_by_ranks(Mixture(between))


def test_counts_of_rows_in_their_first_order_are_those_of_a_rank() -> None:
    assert is_sorted_by_ranks(Added(lambda rows, order, ends: rows))
    assert not is_sorted_by_ranks(Added(lambda rows, order, ends: rows / ends[-1]))


@pytest.mark.parametrize("kind", [Mixture, Added])
def test_mixtures_by_hand_train_on_context_and_expert_ranks(kind: type[Mixture]) -> None:
    torch.manual_seed(0)
    model = kind(lambda rows, order, experts: F.silu(rows))
    inputs = torch.randn(2, TOKENS // 2, WIDTH)
    mesh = pc.Mesh(context=3, expert=3)
    found = pc.compile(
        model, mesh, (inputs,), microbatches=2, precision="fp64", progress=False
    ).verify()
    assert found.ok, str(found)
    assert max(found.loss_error, found.gradient_error, found.parameter_error) <= 1e-9


@pytest.mark.parametrize(("node", "types"), [("cumsum", "R -> R"), ("histc", "R -> R")])
def test_counts_of_other_rows_are_no_counts_of_a_rank(node: str, types: str) -> None:
    program = zoo.captured("hf-mixtral")
    plan = pc.compile(program, pc.Mesh(context=2), microbatches=1).plan
    text, number = re.subn(rf'"({node}[_0-9]*): [^"]*"', rf'"\1: {types}"', plan.to_json())
    assert number
    with pytest.raises(pc.PlanError, match="there is no such conversion"):
        pc.compile(program, pc.Mesh(context=2), microbatches=1, plan=pc.Plan.from_json(text))


def test_an_inverse_with_other_numbers_is_not() -> None:
    assert not is_sorted_by_ranks(Mixture(lambda rows, order, experts: rows, first=1))
