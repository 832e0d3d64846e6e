"""Whatever a user does with a vocabulary on all ranks, the model has its own rows and names."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import parcompiler as pc
from parcompiler import pieces
from tests.distributed import forked
from tests.distributed import vocabulary_use as use

METHODS = ("naive", "vocab-1", "vocab-2", "interlaced")
BOUND = 1e-12  # float64
TABLES = ("embedding.weight", "head.weight")


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """What each rank saw, of two and of four."""
    return {
        number: ranks(number, methods, tmp_path_factory.mktemp("use"))
        for number, methods in ((2, METHODS), (4, ("vocab-2",)))
    }


def ranks(number: int, methods: tuple[str, ...], folder: Path) -> list[dict[str, Any]]:
    """Export every model with every method, and use them."""
    example = use.batch(0, microbatches=1)
    for name, make in use.MODELS.items():
        source: nn.Module | pc.Program = make()
        inputs: dict[str, torch.Tensor] | None = example
        for method in methods:
            program = pc.compile(
                source, pc.Mesh(pipeline=number), inputs, microbatches=use.MICROBATCHES,
                schedule="1f1b", vocabulary=method, precision="fp64",
            )  # fmt: skip
            program.export(folder / f"{name} {method}")
            source, inputs = program, None
    forked.run(number, use.main, str(folder))
    return [torch.load(folder / f"rank_{r}.pt", weights_only=False) for r in range(number)]


CASES = [*((2, method) for method in METHODS), (4, "vocab-2")]
every_case = pytest.mark.parametrize(("number", "method"), CASES)
Seen = dict[int, list[dict[str, Any]]]


def pieces_of(batch: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Its micro-batches."""
    parts = [tensor.split(use.ROWS) for tensor in batch.values()]
    return [dict(zip(batch, part, strict=True)) for part in zip(*parts, strict=True)]


@cache
def one_process() -> dict[str, Any]:
    """The training of `use.train` as one would write it."""
    model = use.MODELS["plain"]().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=use.RATE, weight_decay=use.DECAY)
    losses = []
    for seed in range(use.STEPS):
        optimizer.zero_grad()
        losses.append(accumulate(model, use.batch(seed)))
        optimizer.step()
    fresh = use.MODELS["plain"]().double()
    nothing = accumulate(fresh, use.ignored())
    gradients = {name: p.grad for name, p in fresh.named_parameters()}
    return {
        "losses": torch.stack(losses),
        "trained": {name: p.detach() for name, p in model.named_parameters()},
        "nothing": nothing,
        "gradients": gradients,
    }


def accumulate(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    losses = []
    for part in pieces_of(batch):
        losses.append(model(**part))
        (losses[-1] / use.MICROBATCHES).backward()
    return torch.stack(losses).mean().detach()


@every_case
def test_weights_come_in_and_out_as_those_of_the_model(
    number: int, method: str, seen: Seen
) -> None:
    first, *others = (rank[f"plain {method}"] for rank in seen[number])
    wanted = use.MODELS["plain"]().double().state_dict()
    for state in (first["given"], first["again"]):
        assert state.keys() == wanted.keys()
        assert all(torch.equal(state[name], wanted[name]) for name in wanted)
    assert all(other["given"] is None for other in others)


@every_case
def test_steps_with_weight_decay_are_those_of_one_process(
    number: int, method: str, seen: Seen
) -> None:
    found, wanted = seen[number][0][f"plain {method}"], one_process()
    torch.testing.assert_close(found["losses"], wanted["losses"], rtol=BOUND, atol=0)
    for name, tensor in wanted["trained"].items():
        torch.testing.assert_close(found["trained"][name], tensor, rtol=1e-9, atol=1e-9)
    for rank in seen[number][1:]:
        assert torch.equal(rank[f"plain {method}"]["losses"], found["losses"])


@every_case
def test_all_ranks_agree_on_names_of_the_whole_model(number: int, method: str, seen: Seen) -> None:
    for rank in seen[number]:
        found = rank[f"plain {method}"]
        assert found["loaded"] == ([], [])
        first, second, advice = found["refused"].splitlines()
        assert first.startswith("the state dict lacks ")
        assert set(first.split("'")[1::2]) == {
            "embedding.weight", "layers.0.ffn_norm.bias", "layers.3.ffn_norm.bias"
        }  # fmt: skip
        assert second == "the state dict has unknown 'heads.weight' (1)"
        assert advice == "nothing is loaded (strict=False loads what fits)"


@every_case
def test_rows_behind_the_last_word_stay_zero(number: int, method: str, seen: Seen) -> None:
    padded = 0
    for index, rank in enumerate(seen[number]):
        size = pieces.own_rows(use.VOCABULARY, number, index).size
        for name in TABLES:
            table = rank[f"plain {method}"]["held"][name]
            assert len(table) == pieces.rows(use.VOCABULARY, number)
            assert not table[size:].any()
            assert table[:size].any(1).all()
            padded += len(table) - size
    assert padded > 0


@every_case
def test_a_micro_batch_without_labels_is_what_eager_makes_of_it(
    number: int, method: str, seen: Seen
) -> None:
    wanted = one_process()
    assert wanted["nothing"].isnan()
    for rank in seen[number]:
        assert rank[f"plain {method}"]["nothing"].isnan()
    found = seen[number][0][f"plain {method}"]["gradients"]
    for name, gradient in wanted["gradients"].items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-12, equal_nan=True)


@every_case
def test_an_evaluation_is_that_of_one_process_in_evaluation_mode(
    number: int, method: str, seen: Seen
) -> None:
    model = use.MODELS["dropout"]().double().eval()
    with torch.no_grad():
        wanted = torch.stack([model(**part) for part in pieces_of(use.batch(1))]).mean()
    for rank in seen[number]:
        evaluation = rank[f"dropout {method} True"]["evaluation"]
        torch.testing.assert_close(evaluation, wanted, rtol=BOUND, atol=0)


@every_case
def test_an_evaluation_changes_neither_parameters_nor_later_draws(
    number: int, method: str, seen: Seen
) -> None:
    for rank in seen[number]:
        without, between = (rank[f"dropout {method} {on}"] for on in (False, True))
        assert between["same"]
        assert torch.equal(between["losses"], without["losses"])
        assert without["losses"].unique().numel() == 2  # each step draws its own
