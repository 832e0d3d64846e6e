"""Closed forms say of any sizes what a fresh capture at these sizes says, to the last digit."""

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from parcompiler.capture import capture
from parcompiler.capture.clean import simplify
from parcompiler.cost.operation import EXCHANGE
from parcompiler.mesh import Mesh
from parcompiler.options import Options
from parcompiler.problem import Problem
from parcompiler.symbolic.forms import (
    FIELDS,
    ClosedForms,
    Forms,
    RankCosts,
    closed_forms,
    quantities,
)
from parcompiler.symbolic.naming import symbol
from parcompiler.symbolic.sizes import Sizes, resized, sizes_of
from tests.symbolic.models import problem_of

ELSEWHERE = {"b": 6, "s": 20, "s2": 12}


def forms_of(problem: Problem) -> ClosedForms:
    """The closed forms of a problem that nothing divides."""
    known = sizes_of(problem.graph)

    def at(sizes: Sizes) -> Problem:
        return resized(problem, known, {size.letter: size.now for size in known} | dict(sizes))

    return closed_forms(RankCosts(problem, 1, at))


def at_sizes(forms: Forms, sizes: Sizes) -> dict[str, float]:
    """The forms of a template as numbers."""
    given = [(symbol(letter), number) for letter, number in sizes.items()]
    return {field: float(getattr(forms, field).subs(given)) for field in FIELDS}


@pytest.mark.parametrize(
    ("name", "letters"),
    [
        ("gpt", "b s"),
        ("llama", "b s"),
        pytest.param("bert", "b s", marks=pytest.mark.sweep),
        ("t5", "b s s2"),
        ("resnet", "b"),
        ("hugging_face", "b s"),
        ("dlrm", "b"),
        pytest.param("moe", "b", marks=pytest.mark.sweep),
    ],
)
def test_the_costs_at_other_sizes_are_those_of_a_fresh_capture(name: str, letters: str) -> None:
    problem = problem_of(name, 2)
    closed = forms_of(problem)
    assert [size.letter for size in closed.sizes] == letters.split()
    at = {letter: ELSEWHERE[letter] for letter in letters.split()}
    other = problem_of(name, at["b"], at.get("s", 32), at.get("s2", 16))
    fresh, tensors = other.priced(1), other.graph.parameters
    blocks = problem.priced(1).cut.blocks
    assert [len(block.nodes) for block in blocks] == [len(b.nodes) for b in fresh.cut.blocks]
    trained = {item.name: item.nbytes for item in tensors if item.trainable}
    for block, cost in zip(blocks, fresh.costs, strict=True):
        values = at_sizes(closed.forms(block.template), at)
        for side in ("forward", "backward"):
            done = [op for op in getattr(cost, side) if op.kind != EXCHANGE]
            assert values[f"flops_{side}"] == sum(op.flops for op in done)
            assert values[f"bytes_{side}"] == sum(op.nbytes for op in done)
        assert values["saved"] == cost.saved
        assert values["message"] == cost.output_bytes
        weights = sum(trained.get(binding.name, 0) for binding in block.tensors)
        assert values["parameters"] == values["gradients"] == weights
        assert values["optimizer"] == 2 * weights  # AdamW


def test_the_products_of_a_layer_have_the_textbook_form() -> None:
    closed = forms_of(problem_of("gpt", 2))
    terms = closed.forms("Layer", {"h": 32}).flops_forward.as_coefficients_dict()
    written = {str(term): coefficient for term, coefficient in terms.items()}
    # Narayanan et al. (2021), appendix: 24 B s h^2 + 4 B s^2 h for the products of a layer.
    assert written["b*h**2*s"] == 24
    assert written["b*h*s**2"] == 4
    for field in FIELDS:
        named = getattr(closed.forms("Layer", {"h": 32}), field)
        assert (named.subs(symbol("h"), 32) - getattr(closed.forms("Layer"), field)).expand() == 0


def test_one_row_at_capture_gives_the_costs_of_several() -> None:
    problem = problem_of("gpt", 1)
    closed = forms_of(problem)
    assert [size.letter for size in closed.sizes] == ["b", "s"]
    fresh = problem_of("gpt", 4, 24).priced(1)
    for block, cost in zip(problem.priced(1).cut.blocks, fresh.costs, strict=True):
        found = at_sizes(closed.forms(block.template), {"b": 4, "s": 24})
        for field, row in quantities(cost).items():
            assert field == "inner" or found[field] == sum(row)


def test_slots_that_the_model_computes_from_the_sequence_are_no_constants() -> None:
    closed = forms_of(problem_of("moe", 2))
    assert [size.letter for size in closed.sizes] == ["b"]
    assert dict(closed.refused) == {"sequence": "the costs are no polynomial of low degree"}


class Pairs(nn.Module):
    """A cost that is cubic in the sequence, and a number that is the batch by chance."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        scores = x @ x.transpose(1, 2)
        cubes: Tensor = scores.unsqueeze(-1) * x.sum(-1)[:, None, None, :]
        return (cubes + torch.zeros(2)[0]).mean()


def test_a_cubic_cost_is_found() -> None:
    inputs = {"tokens": torch.zeros(2, 32, dtype=torch.long)}
    problem = Problem(simplify(capture(Pairs(), inputs)), Mesh(), Options(microbatches=1))
    closed = forms_of(problem)
    (template,) = closed.costs.first
    assert "b*s**3" in str(closed.forms(template).flops_forward)


def test_a_graph_without_its_model_has_numbers_for_forms() -> None:
    problem = problem_of("gpt", 2)
    alone = dataclasses.replace(problem.graph, recapture=None)
    closed = forms_of(problem.anew(graph=alone))
    assert closed.sizes == ()
    assert dict(closed.refused)["batch"] == "its graph was not captured from a model"
    assert closed.forms("Layer").flops_forward.is_Integer


def test_sizes_of_inputs_are_found_by_what_they_are() -> None:
    found = {size.word: (size.letter, size.now) for size in sizes_of(problem_of("t5", 2).graph)}
    assert found == {"batch": ("b", 2), "sequence": ("s", 32), "target": ("s2", 16)}
