"""Divisions that the user gives: even as Megatron-LM deals layers, or counts at a granularity."""

import re
from itertools import groupby, product

import pytest

import parcompiler as pc
from parcompiler.passes.given import _spread, division
from tests import zoo
from tests.passes.handmade import chain


def layers(stage_of: tuple[int, ...], stages: int) -> list[int]:
    """How many layers each stage has, of a chain with an embedding and a head."""
    return [stage_of[1:-1].count(j) for j in range(stages)]


def test_the_embedding_goes_with_the_first_layer_and_the_head_with_the_last() -> None:
    level, stage_of = division(chain([9.0, 1, 1, 1, 1, 9]), "even", 2)
    assert level == 1
    assert stage_of == (0, 0, 0, 1, 1, 1)


@pytest.mark.parametrize(
    ("count", "stages", "wanted"),
    [(4, 4, [1, 1, 1, 1]), (5, 2, [3, 2]), (5, 3, [2, 2, 1]), (8, 3, [3, 3, 2]), (6, 1, [6])],
)
def test_the_first_stages_take_the_remainder(count: int, stages: int, wanted: list[int]) -> None:
    level, stage_of = division(chain([1.0] * (count + 2)), "even", stages)
    assert level == 1
    assert layers(stage_of, stages) == wanted


@pytest.mark.parametrize(
    ("count", "stages", "wanted"), [(7, 3, [2, 3, 2]), (6, 8, [0, 1, 1, 1, 1, 1, 1, 0])]
)
def test_embedding_and_head_count_where_two_more_layers_divide_evenly(
    count: int, stages: int, wanted: list[int]
) -> None:
    level, stage_of = division(chain([1.0] * (count + 2)), "even", stages)
    assert level == 1
    assert layers(stage_of, stages) == wanted
    assert len(set(stage_of)) == stages


def test_even_looks_at_no_cost() -> None:
    assert division(chain([1.0, 100, 1, 1, 1, 1]), "even", 2)[1] == (0, 0, 0, 1, 1, 1)


def test_pieces_of_layers_are_dealt_out_when_layers_are_too_few() -> None:
    level, stage_of = division(chain([1.0, 1, 1, 1]), "even", 3)
    assert level == 2
    assert stage_of == (0, 0, 0, 1, 2, 2)


def test_more_stages_than_pieces_are_refused() -> None:
    with pytest.raises(pc.InputError, match=r"more stages than layers \(5 > 4\): use fewer pipel"):
        division(chain([1.0, 1, 1, 1]), "even", 5)


@pytest.mark.parametrize("stages", range(1, 6))
def test_every_dealing_is_contiguous_fills_all_stages_and_is_even(stages: int) -> None:
    for marks in product([True, False], repeat=9):
        if sum(marks) < stages:
            continue
        found = _spread(marks, stages)
        assert [j for j, _ in groupby(found)] == list(range(stages))
        counts = [
            sum(m for m, at in zip(marks, found, strict=True) if at == j) for j in range(stages)
        ]
        assert counts == sorted(counts, reverse=True)
        assert counts[0] - counts[-1] <= 1
        for before, (mark, at) in zip(
            found, list(zip(marks, found, strict=True))[1:], strict=False
        ):
            assert mark or at == before  # what is no layer stays with what came before it


def test_counts_fit_the_granularity_that_has_so_many_blocks() -> None:
    problem = chain([1.0, 1, 1, 1, 1])
    assert division(problem, (1, 4), 2) == (1, (0, 1, 1, 1, 1))
    assert division(problem, (2, 6), 2) == (2, (0, 0, 1, 1, 1, 1, 1, 1))


def test_counts_of_no_granularity_are_refused_with_the_blocks() -> None:
    message = (
        "the counts (3, 4) add up to 7 blocks, but the model has 5 or 8: "
        "embedding, layers.0, layers.1, layers.2, head"
    )
    with pytest.raises(pc.InputError, match=re.escape(message)):
        division(chain([1.0, 1, 1, 1, 1]), (3, 4), 2)


def test_a_count_is_needed_for_each_stage() -> None:
    with pytest.raises(pc.InputError, match="stages has 3 counts for 2 pipeline stages"):
        division(chain([1.0, 1, 1, 1, 1]), (1, 2, 2), 2)


@pytest.mark.parametrize("name", ["gpt", "bert", "t5", "resnet"])
def test_models_are_dealt_out_evenly(name: str) -> None:
    model, inputs = zoo.build(name)
    plan = pc.compile(model, pc.Mesh(pipeline=2), inputs, stages="even").plan
    assert plan.stages is not None
    numbered = [
        [block for block in choice.blocks if re.search(r"\.\d", block)] for choice in plan.stages
    ]
    assert len(numbered[0]) - len(numbered[1]) in (0, 1)
