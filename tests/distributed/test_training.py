"""Training on two ranks is training in one process: losses, parameters, buffers, evaluation."""

from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

import parcompiler as pc
from tests import zoo
from tests.distributed import forked, training
from tests.distributed.training import MICROBATCHES, STEPS, batch

NAMES = ("gpt-tied", "resnet")
Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """What both ranks saw."""
    folder = tmp_path_factory.mktemp("training")
    for name in NAMES:
        model, inputs = zoo.build(name)
        program = pc.compile(
            model, pc.Mesh(pipeline=2), inputs, microbatches=MICROBATCHES, schedule="1f1b"
        )
        program.export(folder / name)
    forked.run(2, training.main, str(folder))
    return [torch.load(folder / f"rank_{rank}.pt", weights_only=False) for rank in range(2)]


@cache
def one_process(name: str) -> dict[str, Any]:
    """The same training as a user would write it."""
    model, inputs = zoo.build(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for seed in range(STEPS):
        losses.append(accumulate(model, inputs, seed))
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        parts = [model(**part) for part in pieces(inputs, 99)]
    model.train()
    parameters = {n: p.detach().clone() for n, p in model.named_parameters()}
    accumulate(model, inputs, 0)
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    accumulate(model, inputs, 0)  # the ranks made two more steps: running statistics count them
    return {
        "losses": torch.stack(losses),
        "evaluation": torch.stack(parts).mean(),
        "parameters": parameters,
        "gradients": {n: g / 2 for n, g in gradients.items()},
        "buffers": dict(model.named_buffers()),
    }


def accumulate(model: nn.Module, inputs: dict[str, torch.Tensor], seed: int) -> torch.Tensor:
    losses = []
    for part in pieces(inputs, seed):
        loss = model(**part)
        (loss / MICROBATCHES).backward()
        losses.append(loss.detach())
    return torch.stack(losses).mean()


def pieces(inputs: dict[str, torch.Tensor], seed: int) -> list[dict[str, torch.Tensor]]:
    whole = batch(inputs, seed)
    return [
        {key: tensor.chunk(MICROBATCHES)[i] for key, tensor in whole.items()}
        for i in range(MICROBATCHES)
    ]


@pytest.mark.parametrize("name", NAMES)
def test_every_rank_has_the_losses_of_one_process(name: str, ranks: Ranks) -> None:
    wanted = one_process(name)["losses"]
    assert torch.allclose(ranks[0][name]["losses"], wanted, rtol=1e-6, atol=0)
    assert torch.equal(ranks[0][name]["losses"], ranks[1][name]["losses"])
    assert wanted.unique().numel() == STEPS


@pytest.mark.parametrize("name", NAMES)
def test_parameters_after_training_are_those_of_one_process(name: str, ranks: Ranks) -> None:
    wanted = one_process(name)["parameters"]
    whole = ranks[0][name]["whole"]
    assert ranks[1][name]["whole"] is None
    for key, tensor in wanted.items():
        assert torch.allclose(whole[key], tensor, rtol=1e-4, atol=2e-6), key
    held = ranks[0][name]["own"].keys() | ranks[1][name]["own"].keys()
    assert held == wanted.keys()


@pytest.mark.parametrize("name", NAMES)
def test_gradients_after_training_are_those_of_one_process(name: str, ranks: Ranks) -> None:
    wanted = one_process(name)["gradients"]
    for rank in ranks:
        for key, gradient in rank[name]["gradients"].items():
            limit = 1e-4 * float(wanted[key].abs().max()) + 1e-6
            assert float((gradient - wanted[key]).abs().max()) <= limit, key


def test_the_copies_of_a_tied_tensor_stay_bitwise_equal(ranks: Ranks) -> None:
    first, last = (rank["gpt-tied"]["own"] for rank in ranks)
    shared = first.keys() & last.keys()
    assert len(shared) == 1
    (name,) = shared
    assert torch.equal(first[name], last[name])
    model = zoo.build("gpt-tied")[0]
    assert not torch.equal(first[name], model.get_parameter(name))


@pytest.mark.parametrize("name", NAMES)
def test_an_evaluation_is_that_of_one_process_on_every_rank(name: str, ranks: Ranks) -> None:
    wanted = one_process(name)["evaluation"]
    for rank in ranks:
        assert torch.allclose(rank[name]["evaluation"], wanted, rtol=1e-5, atol=0)
    assert torch.equal(*(rank[name]["evaluation"] for rank in ranks))


def test_running_statistics_are_those_of_one_process(ranks: Ranks) -> None:
    wanted = one_process("resnet")["buffers"]
    whole = ranks[0]["resnet"]["whole"]
    assert any(key.endswith("num_batches_tracked") for key in wanted)
    for key, buffer in wanted.items():
        assert torch.allclose(whole[key], buffer, rtol=1e-4, atol=1e-6), key


@pytest.mark.parametrize("name", NAMES)
def test_a_trace_covers_every_instruction_in_order(name: str, ranks: Ranks) -> None:
    model, inputs = zoo.build(name)
    program = pc.compile(
        model, pc.Mesh(pipeline=2), inputs, microbatches=MICROBATCHES, schedule="1f1b"
    )
    for number, rank in enumerate(ranks):
        trace = rank[name]["trace"]
        assert [text for text, *_ in trace] == [str(i) for i in program.instructions(number)]
        assert all(0 <= begin <= end for _, begin, end, _ in trace)
        assert all(a[2] <= b[1] for a, b in pairwise(trace))


@pytest.mark.parametrize("name", NAMES)
def test_a_trace_tells_the_waiting_for_messages_apart(name: str, ranks: Ranks) -> None:
    for rank in ranks:
        trace = rank[name]["trace"]
        assert all(0 <= waited <= end - begin for _, begin, end, waited in trace)
        assert any(waited for *_, waited in trace)
        waiting = {text.split()[0] for text, *_, waited in trace if waited}
        assert waiting <= {"FORWARD", "BACKWARD", "SHARE_LOSS"}


@pytest.mark.parametrize("name", NAMES)
def test_a_rank_keeps_the_activations_of_those_in_flight_only(name: str, ranks: Ranks) -> None:
    assert [rank[name]["peak"] for rank in ranks] == [2, 1]
    assert [rank[name]["left"] for rank in ranks] == [0, 0]
    assert [rank[name]["pending"] for rank in ranks] == [0, 0]


def test_ranks_that_run_different_programs_are_refused(ranks: Ranks) -> None:
    for rank in ranks:
        assert "the ranks run different programs (rank 1 has others than " in rank["refused"]


def test_a_rank_that_cannot_load_its_weights_stops_the_others(ranks: Ranks) -> None:
    assert "stage_1.safetensors is cut short" in ranks[1]["lame"]
    assert "because rank 1 failed in its start: InputError" in ranks[0]["lame"]
