"""PipeDream on real processes is its sequential re-enactment, step after step."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import parcompiler as pc
from parcompiler.temporary import threads
from parcompiler.verification.batches import random_batch
from parcompiler.verification.pool import Job, Outcome, pool
from parcompiler.verification.reference import Original, reenacted
from tests import zoo

STEPS = 3
OPTIMIZERS: dict[str, dict[str, float]] = {
    "SGD": {"lr": 0.05, "momentum": 0.9},
    "AdamW": {"lr": 1e-3},
}


def compiled(name: str, pipeline: int, microbatches: int, schedule: str) -> pc.Program:
    mesh = pc.Mesh(pipeline=pipeline)
    return pc.compile(
        zoo.captured(name, "fp64"),
        mesh,
        microbatches=microbatches,
        schedule=schedule,
        precision="fp64",
    )


def batches(program: pc.Program) -> list[dict[str, torch.Tensor]]:
    """A batch for each step."""
    count = program.plan.microbatches
    return [random_batch(program.problem.graph, count, seed) for seed in range(STEPS)]


def trained(program: pc.Program, optimizer: str, folder: Path) -> Outcome:
    """What real processes make of the steps."""
    path = program.export(folder / "program")
    job = Job(str(path), batches(program), optimizer=optimizer, options=OPTIMIZERS[optimizer])
    return pool().run(job, program.lowered.size)


def in_one_process(program: pc.Program, optimizer: str, order: pc.Program) -> Outcome:
    """What the original model makes of the steps, updated as late as on the ranks of `order`."""
    kind: Any = getattr(torch.optim, optimizer)
    with threads(1), Original(program, 0, torch.float64) as original:
        made = partial(kind, **OPTIMIZERS[optimizer])
        return reenacted(original, order.lowered, batches(program), made)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("pipeline", [2, 4])
@pytest.mark.parametrize(
    ("name", "microbatches"), [("gpt", 1), ("gpt", 2), ("gpt", 4), ("gpt", 8), ("resnet", 8)]
)
def test_losses_and_weights_are_those_of_the_re_enactment(
    name: str, microbatches: int, pipeline: int, optimizer: str, tmp_path: Path
) -> None:
    check(name, microbatches, pipeline, optimizer, tmp_path)


@pytest.mark.sweep
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("pipeline", [2, 4])
@pytest.mark.parametrize("microbatches", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("name", ["gpt", "llama", "hf-vit", "resnet"])
def test_losses_and_weights_of_many_models(
    name: str, microbatches: int, pipeline: int, optimizer: str, tmp_path: Path
) -> None:
    check(name, microbatches, pipeline, optimizer, tmp_path)


def check(name: str, microbatches: int, pipeline: int, optimizer: str, tmp_path: Path) -> None:
    program = compiled(name, pipeline, microbatches, "pipedream")
    found = trained(program, optimizer, tmp_path)
    wanted = in_one_process(program, optimizer, program)
    assert torch.allclose(found.losses, wanted.losses, rtol=1e-9, atol=0)
    assert found.gradients == {}
    for key, tensor in wanted.state.items():
        if tensor.is_floating_point():
            error = (found.state[key] - tensor).abs().max() / tensor.abs().max()
            assert error <= 1e-9, key
        else:
            assert torch.equal(found.state[key], tensor), key


def test_the_re_enactment_depends_on_how_late_updates_are() -> None:
    programs = [compiled("gpt", ranks, 8, "pipedream") for ranks in (1, 2, 4)]
    losses = [in_one_process(programs[0], "SGD", order).losses for order in programs]
    for first, second in ((0, 1), (0, 2), (1, 2)):
        assert (losses[first] - losses[second]).abs().max() > 1e-6


def test_without_delay_it_is_ordinary_training_on_every_micro_batch() -> None:
    program = compiled("gpt", 1, 4, "pipedream")
    model, _ = zoo.build("gpt")
    model.double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=OPTIMIZERS["AdamW"]["lr"])
    losses = []
    for batch in batches(program):
        for i in range(4):
            rows = {key: tensor.chunk(4)[i] for key, tensor in batch.items()}
            loss = model(**rows)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    found = in_one_process(program, "AdamW", program)
    wanted = torch.stack(losses).reshape(STEPS, 4).mean(dim=1)
    assert torch.allclose(found.losses, wanted, rtol=1e-12)
    for key, tensor in model.named_parameters():
        assert torch.allclose(found.state[key], tensor, rtol=1e-9, atol=1e-12), key


@pytest.mark.parametrize(
    ("name", "pipeline", "recompute"),
    [("llama", 4, "none"), ("gpt-dropout", 2, "none"), ("gpt-dropout", 4, "full")],
)
def test_a_program_is_proved_by_its_re_enactment(name: str, pipeline: int, recompute: str) -> None:
    model, inputs = zoo.build(name)
    mesh = pc.Mesh(pipeline=pipeline)
    program = pc.compile(
        model, mesh, inputs, microbatches=6, schedule="pipedream", recompute=recompute
    )
    found = program.verify()
    assert found.ok, str(found)
    assert max(found.loss_error, found.parameter_error) <= 1e-9
    assert found.gradient_error == 0.0
    assert "gradients used by the updates" in str(found)
    assert "re-enacted in one process" in str(found)


def test_copies_that_would_drift_apart_are_refused_before_anything_starts() -> None:
    model, inputs = zoo.build("gpt-tied")
    with pytest.raises(pc.InputError, match=r"embedding\.weight is on stages 0, 1") as caught:
        pc.compile(model, pc.Mesh(pipeline=2), inputs, microbatches=4, schedule="pipedream")
    assert "untie them or take a synchronous schedule" in str(caught.value)
    pc.compile(model, pc.Mesh(), inputs, microbatches=4, schedule="pipedream")
