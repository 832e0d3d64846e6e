"""Programs with recomputation compute what the original model computes; see test_parity."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

import parcompiler as pc
from parcompiler.codegen.stage import StageWriter
from parcompiler.device import device
from tests import zoo

BITWISE = {"gpt-dropout", "llama", "resnet"}  # as without recomputation: see test_parity


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("name", ["gpt-dropout", "llama", "resnet", "t5"])
def test_a_program_that_recomputes_equals_one_process(name: str, schedule: str) -> None:
    program = pc.compile(
        zoo.captured(name), pc.Mesh(pipeline=2), schedule=schedule, microbatches=3, recompute="full"
    )
    assert program.plan.recompute
    found = program.verify()
    assert found.ok, str(found)
    assert max(found.loss_error, found.gradient_error, found.parameter_error) <= 1e-9
    if name in BITWISE:
        assert found.native.bitwise, str(found)


def check_offloaded(name: str, mesh: pc.Mesh, **options: Any) -> pc.Verification:
    """Verify a program all of whose layers wait in the host's memory, by its own text."""
    program = pc.compile(zoo.captured(name), mesh, microbatches=4, recompute="offload", **options)
    lowered = program.lowered
    texts = [StageWriter(lowered, stage, "cpu").text() for stage in lowered.stages]
    assert program.plan.offload
    assert any("runtime.offloaded(" in text for text in texts)
    assert not any("runtime.recomputed(" in text for text in texts)
    found = program.verify()
    assert max(found.loss_error, found.gradient_error, found.parameter_error) <= 1e-9, str(found)
    return found


@pytest.mark.parametrize(("name", "schedule"), [("gpt-dropout", "1f1b"), ("resnet", "zb-h1")])
def test_layers_that_wait_in_the_hosts_memory_leave_every_bit_as_it_is(
    name: str, schedule: str
) -> None:
    assert check_offloaded(name, pc.Mesh(pipeline=2), schedule=schedule).native.bitwise


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["gpt-dropout", "llama", "t5", "moe"])
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ({"pipeline": 2}, {"schedule": "pipedream"}),
        ({"pipeline": 2}, {"schedule": "interleaved", "virtual_stages": 2}),
        ({"pipeline": 2}, {"vocabulary": "vocab-2"}),
        ({"pipeline": 2, "tensor": 2}, {"schedule": "zb-h1"}),
        ({"context": 2}, {}),
        ({"data": 2}, {"zero": 1}),
        ({"data": 2}, {"zero": 3}),
        ({"data": 2, "expert": 2}, {}),
    ],
)
def test_every_mesh_may_offload(name: str, mesh: dict[str, Any], options: Any) -> None:
    try:
        check_offloaded(name, pc.Mesh(**mesh), **options)
    except (pc.InputError, pc.PlanError) as error:
        if not isinstance(error, pc.InputError) and "untie them" not in str(error):
            raise
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("name", "mesh", "schedule"),
    [
        ("gpt-dropout", pc.Mesh(pipeline=2), "zb-h1"),
        ("llama", pc.Mesh(pipeline=2), "1f1b"),
        ("t5", pc.Mesh(pipeline=2), "gpipe"),
    ],
)
def test_operators_that_run_again_leave_every_bit_as_it_is(
    name: str, mesh: pc.Mesh, schedule: str
) -> None:
    program = pc.compile(
        zoo.captured(name), mesh, schedule=schedule, microbatches=3, recompute="selective",
        vocabulary="whole",
    )  # fmt: skip
    assert program.plan.selective
    assert not program.plan.recompute
    lowered = program.lowered
    texts = [StageWriter(lowered, stage, "cpu").text() for stage in lowered.stages]
    assert all("runtime.again(" in text and "    again = True" in text for text in texts)
    found = program.verify()
    assert max(found.loss_error, found.gradient_error, found.parameter_error) <= 1e-9
    if name == "gpt-dropout":  # an RMS norm of the CPU adds up several gradients of its input
        assert found.native.bitwise, str(found)


def test_what_memory_forces_to_be_recomputed_equals_one_process() -> None:
    """The programme chooses some layers, not all: dropout in both sorts is that of one process."""
    small = dataclasses.replace(device("cpu"), name="small", memory=250_000)
    program = pc.compile(
        zoo.captured("gpt-dropout"),
        pc.Mesh(pipeline=2, device=small),
        schedule="1f1b",
        vocabulary="whole",
        microbatches=3,
    )
    blocks = [name for choice in program.plan.stages or () for name in choice.blocks]
    assert 0 < len(program.plan.recompute or ()) < len(blocks)
    assert program.plan.solution is not None
    assert program.plan.solution.status == "optimal"
    assert max(program.simulate().peak_memory) <= small.memory
    found = program.verify()
    assert max(found.loss_error, found.gradient_error, found.parameter_error) <= 1e-9
    assert found.native.bitwise, str(found)


def test_some_layers_may_be_recomputed() -> None:
    patterns = {"layers.*": True, "layers.1": False, "layers.3.ffn": False}
    program = pc.compile(
        zoo.captured("gpt-dropout"), pc.Mesh(pipeline=2), microbatches=3, recompute=patterns
    )
    assert program.plan.recompute
    assert not any(name.startswith("layers.1") for name in program.plan.recompute)
    found = program.verify()
    assert found.native.bitwise, str(found)


class Parts(nn.Module):
    """Parts and conjugates of complex values, which run again."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = torch.complex(self.linear(x), x)
        w = z * z
        y: torch.Tensor = (w.conj() * w * z).imag.sin() + torch.tanh(w.real)
        return y


class Moments(nn.Module):
    """Of two results of an operator one is cast to a wider number, which runs again."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.RMSNorm(1, 0.01)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        variance, mean = torch.var_mean(self.linear(x), dim=-1, keepdim=True)
        y: torch.Tensor = x + torch.tanh(variance.bfloat16().float()) + self.norm(mean)
        return y


@pytest.mark.parametrize("way", ["selective", "offload"])
@pytest.mark.parametrize(("layer", "precision"), [(Parts, "fp64"), (Moments, "bf16")])
def test_views_of_what_runs_again_are_exact(
    layer: type[nn.Module], precision: str, way: str
) -> None:
    torch.manual_seed(0)
    model, inputs = nn.Sequential(layer(), layer()), (torch.randn(3, 4),)
    program = pc.compile(
        model, pc.Mesh(), inputs, loss=lambda y: y.square().mean(), microbatches=2,
        recompute=way, precision=precision,
    )  # fmt: skip
    found = program.verify()
    assert found.ok, str(found)
