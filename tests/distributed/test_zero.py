"""Data ranks that share the updates out train as those do that each make all of them."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import parcompiler as pc
from parcompiler.models import gpt
from parcompiler.verification.pool import Job, Outcome, pool
from tests import architectures, zoo
from tests.distributed import forked, live_bytes

STEPS = 3
ROUNDING = {None: 1e-6, "bf16": torch.finfo(torch.bfloat16).eps, "fp16": 2e-3}
LEVELS = (1, 2, 3)
ADAMW = {"lr": 0.01, "weight_decay": 0.1}
CASES: list[tuple[str, tuple[int, int, int], dict[str, Any], str]] = [
    ("gpt-tied", (1, 1, 2), {"recompute": "selective"}, "AdamW"),
    ("dlrm", (1, 1, 2), {}, "Adagrad"),
    ("gpt-tied", (2, 1, 2), {"schedule": "zb-h1", "vocabulary": "vocab-2"}, "AdamW"),
    ("gpt-tied", (2, 1, 2), {"schedule": "1f1b", "vocabulary": "whole"}, "Adafactor"),
    ("llama", (1, 2, 2), {"precision": "bf16"}, "AdamW"),
    ("llama", (1, 1, 3), {"precision": "fp16"}, "SGD"),
    ("t5", (2, 1, 2), {"schedule": "interleaved", "vocabulary": "whole"}, "RMSprop"),
    ("resnet", (2, 1, 2), {"schedule": "gpipe"}, "Adam"),
    ("moe", (1, 2, 2), {"precision": "fp16"}, "Adagrad"),
    ("gpt-dropout", (1, 1, 4), {"recompute": "full"}, "SGD"),
]


def microbatches(options: dict[str, Any]) -> int:
    """One where the schedule can have it, so that pieces are added up in the same order."""
    return 2 if options.get("schedule") in ("zb-h1", "interleaved") else 1


def outcome(
    folder: Path,
    name: str,
    mesh: pc.Mesh,
    options: dict[str, Any],
    zero: int,
    optimizer: str,
) -> Outcome:
    """What some steps make of a model; more than two data ranks clip the gradients."""
    precision = options.get("precision")
    precise = {**options, "precision": precision}
    count = microbatches(options)
    program = pc.compile(
        zoo.captured(name, precision), mesh, microbatches=count, zero=zero, **precise
    )
    assert program.plan.zero == zero
    assert program.plan.selective == (options.get("recompute") == "selective")
    program.export(folder / f"zero-{zero}")
    inputs = zoo.build(name)[1]
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(STEPS):
        batch = {}
        for key, example in inputs.items():
            shape = (example.shape[0] * count * mesh.data, *example.shape[1:])
            if example.dtype.is_floating_point:
                batch[key] = torch.randn(shape, generator=generator, dtype=example.dtype)
            else:
                rows = torch.randint(len(example), shape[:1], generator=generator)
                batch[key] = example[rows]
        batches.append(batch)
    options = ADAMW if optimizer == "AdamW" else {"lr": 0.01}
    max_norm = 0.5 if mesh.data > 2 else None
    path = str(folder / f"zero-{zero}")
    script = Path(path, "rank_0.py").read_text()
    assert (f"zero={zero}" in script) == bool(zero)
    stages = "".join(stage.read_text() for stage in Path(path).glob("stage_*.py"))
    assert ("again" in stages) == program.plan.selective
    lines = [" ".join(line.split()) for line in script.splitlines()]
    assert any(x.startswith("REDUCE_GRADIENTS bucket_0 mb ") for x in lines) == (zero > 1)
    assert any(x.startswith("UNSHARD") for x in lines) == (zero == 3)
    job = Job(path, batches, optimizer=optimizer, options=options, max_norm=max_norm)
    return pool().run(job, program.lowered.grid.size)


@pytest.mark.parametrize(("name", "sizes", "options", "optimizer"), CASES)
def test_shared_updates_are_those_of_every_rank(
    name: str, sizes: tuple[int, int, int], options: dict[str, Any], optimizer: str, tmp_path: Path
) -> None:
    pipeline, tensor, data = sizes
    mesh = pc.Mesh(pipeline=pipeline, tensor=tensor, data=data)
    alone = outcome(tmp_path, name, mesh, options, 0, optimizer)
    # Units of a stage are stages, which draw random numbers each for itself.
    for zero in LEVELS[:2] if name == "gpt-dropout" else LEVELS:
        shared = outcome(tmp_path, name, mesh, options, zero, optimizer)
        assert torch.equal(alone.losses[:1], shared.losses[:1])
        # a + b is b + a; among more, or with pieces of the gradients of each micro-batch, the order
        # of the additions is another, and Adam makes steps of its rounding errors.
        once = microbatches(options) == 1 and (pipeline == 1 or name == "resnet")  # no ties between
        # What goes to pieces is made in 16 bits, also where autograd has it in float32.
        once = once and "precision" not in options
        same = data == 2 and (zero == 1 or once)
        steps = same or (data > 2 and zero == 1)
        pairs = [(shared.gradients, alone.gradients)]
        pairs += [(shared.state, alone.state)] if steps else []
        for found, wanted in pairs:
            assert found.keys() == wanted.keys()
            for key, value in wanted.items():
                if same:
                    assert torch.equal(found[key], value), (zero, key)
                else:
                    error = (found[key] - value).norm() / value.norm().clamp(min=1e-9)
                    assert error <= ROUNDING[options.get("precision")], (zero, key)
        torch.testing.assert_close(shared.losses, alone.losses, rtol=1e-3, atol=0)


class Matrices(nn.Module):
    """It has no other parameters, which Muon does not take."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(4))
        self.wide = nn.Linear(8, 20, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x).relu()
        loss: torch.Tensor = self.wide(x).square().mean()
        return loss


def test_muon_gets_whole_matrices_and_the_report_names_them(tmp_path: Path) -> None:
    torch.manual_seed(0)
    captured = pc.compile(Matrices(), pc.Mesh(), {"x": torch.zeros(2, 8)}, microbatches=1)
    batches = [{"x": torch.randn(4, 8)} for _ in range(STEPS)]
    found, alone = {}, Outcome(torch.zeros(0), {}, {})
    for zero in (0, *LEVELS):
        program = pc.compile(captured, pc.Mesh(data=2), microbatches=1, zero=zero, optimizer="muon")
        path = str(program.export(tmp_path / f"muon-{zero}"))
        job = Job(path, batches, optimizer="Muon", options={"lr": 0.05})
        outcome, found[zero] = pool().run(job, 2), program.report().owned
        alone = outcome if zero == 0 else alone
        assert not torch.equal(outcome.state["wide.weight"], captured.model.wide.weight)  # type: ignore[union-attr, arg-type]
        for name, value in alone.state.items():
            assert torch.equal(outcome.state[name], value), (zero, name)
    assert found[0] == ()
    for zero in LEVELS:
        assert [part.nbytes for part in found[zero]] == [4 * 8 * 28, 4 * 8 * 24]
        assert found[zero][0].names[0] == "wide.weight"
        assert sorted(n for part in found[zero] for n in part.names) == sorted(alone.state)
    with pytest.raises(pc.InputError, match="optimizer='muon' needs whole matrices, and with ten"):
        pc.compile(captured, pc.Mesh(tensor=2), microbatches=1, optimizer="muon")


def test_bytes_in_memory_and_on_their_way_are_those_of_the_level(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("parcompiler.problem.BUCKET", 2**17)  # about a layer
    layers = 8
    config = gpt.Config(layers=layers, heads=2, hidden=48, vocabulary=96, sequence=8)
    model, tokens = gpt.GPT(config), torch.randint(96, (2, 8))
    batch = {"tokens": tokens, "labels": tokens}
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    layer = sum(p.numel() * p.element_size() for p in model.layers[0].parameters())
    captured, folders = pc.compile(model, pc.Mesh(), batch, microbatches=1), []
    for zero in (0, *LEVELS):
        program = pc.compile(captured, pc.Mesh(data=2), microbatches=2, zero=zero)
        folders.append(str(program.export(tmp_path / f"zero-{zero}")))
    torch.save({key: torch.cat([rows, rows]) for key, rows in batch.items()}, tmp_path / "batch")
    text = forked.run(2, live_bytes.main, str(tmp_path / "batch"), *folders)
    found = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    for zero, most in enumerate(found):
        parts = whole // 2 + 2**10  # rows of odd numbers
        assert most["gradients"] <= (parts + 3 * layer if zero >= 2 else whole)
        assert most["parameters"] <= (parts + 3 * layer if zero == 3 else whole)
        assert most["resident"] <= (parts if zero == 3 else whole)
        assert most["gradients"] >= (whole if zero < 2 else whole // 2)
        assert (most["coming"] > 2) == (zero in (1, 2))  # beside the next forward
        assert most["late"] == 0
        assert most["loss"] == pytest.approx(found[0]["loss"], rel=1e-5)
    assert len(found) == 1 + len(LEVELS)


@pytest.mark.sweep
@pytest.mark.parametrize("zero", LEVELS)
@pytest.mark.parametrize("name", ["gpt-tied", "llama", "t5", "resnet", "moe"])
def test_every_mesh_and_schedule_is_exact(name: str, zero: int) -> None:
    program = zoo.captured(name)
    schedules = ("gpipe", "1f1b", "zb-h1", "interleaved", "zb-v")
    for pipeline, tensor, data, schedule, vocabulary in product(
        (1, 2), (1, 2), (2, 3, 4), schedules, ("whole", "vocab-2")
    ):
        if pipeline == 1 and (schedule != "1f1b" or vocabulary != "whole"):
            continue
        mesh = pc.Mesh(pipeline=pipeline, tensor=tensor, data=data)
        try:
            found = pc.compile(
                program, mesh, microbatches=4, schedule=schedule, vocabulary=vocabulary, zero=zero
            )
        except pc.ParcompilerError as error:
            assert "vocabulary" in str(error), error
            continue
        verification = found.verify(seed=0)
        assert verification.ok, (mesh, schedule, vocabulary, str(verification))
        assert found.plan.zero == zero


class Generated(nn.Module):
    """Weights that a layer makes of the rows of a parameter; another one has no elements."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.maker, self.codes = nn.Linear(8, 64), nn.Parameter(torch.randn(3, 8))
        self.last, self.empty = nn.Linear(8, 5), nn.Parameter(torch.empty(0, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for k in range(3):
            x = x + torch.tanh(x @ self.maker(self.codes[k]).view(8, 8))
        loss: torch.Tensor = torch.cat([self.last(x), self.empty]).square().mean()
        return loss


@pytest.mark.parametrize("zero", [1, 3])
def test_rows_that_another_unit_reads_and_no_rows_at_all_are_exact(zero: int) -> None:
    inputs = {"x": torch.randn(4, 8, generator=torch.Generator().manual_seed(0))}
    program = pc.compile(Generated(), pc.Mesh(data=2), inputs, microbatches=2, zero=zero)
    found = program.verify(seed=0)
    assert found.ok, str(found)


@pytest.mark.sweep
@pytest.mark.parametrize("name", [*architectures.CHOSEN, "bloom", "qwen3"])
def test_architectures_are_exact_at_every_level(name: str) -> None:
    model, inputs, loss = architectures.build(name)
    program = pc.compile(model, pc.Mesh(), inputs, loss=loss, microbatches=1)
    meshes = (pc.Mesh(data=3), pc.Mesh(pipeline=2, data=2), pc.Mesh(tensor=2, data=2))
    for mesh, zero in product(meshes, LEVELS):
        found = pc.compile(program, mesh, microbatches=2, zero=zero)
        assert found.plan.zero == zero
        verification = found.verify(seed=0)
        assert verification.ok, (mesh, zero, str(verification))
