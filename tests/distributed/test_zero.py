"""Data ranks that share the updates out train as those do that each make all of them."""

from __future__ import annotations

from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import parcompiler as pc
from parcompiler.verification.pool import Job, Outcome, pool
from tests import zoo

STEPS = 3
ADAMW = {"lr": 0.01, "weight_decay": 0.1}
CASES: list[tuple[str, tuple[int, int, int], dict[str, Any], str]] = [
    ("gpt-tied", (1, 1, 2), {}, "AdamW"),
    ("gpt-tied", (2, 1, 2), {"schedule": "zb-h1", "vocabulary": "vocab-2"}, "AdamW"),
    ("gpt-tied", (2, 1, 2), {"schedule": "1f1b", "vocabulary": "whole"}, "Adafactor"),
    ("llama", (1, 2, 2), {"precision": "bf16"}, "AdamW"),
    ("llama", (1, 1, 3), {"precision": "fp16"}, "SGD"),
    ("t5", (2, 1, 2), {"schedule": "interleaved", "vocabulary": "whole"}, "RMSprop"),
    ("resnet", (2, 1, 2), {"schedule": "gpipe"}, "Adam"),
    ("moe", (1, 2, 2), {"precision": "fp16"}, "Adafactor"),
    ("gpt-dropout", (1, 1, 4), {"recompute": "full"}, "SGD"),
]


@cache
def captured(name: str, precision: str | None) -> pc.Program:
    """The model compiled for one rank, so that other meshes need not capture it again."""
    model, inputs = zoo.build(name)
    return pc.compile(model, pc.Mesh(), inputs, microbatches=1, precision=precision)


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
    program = pc.compile(captured(name, precision), mesh, microbatches=2, zero=zero, **precise)
    assert program.plan.zero == zero
    program.export(folder / f"zero-{zero}")
    inputs = zoo.build(name)[1]
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(STEPS):
        batch = {}
        for key, example in inputs.items():
            shape = (example.shape[0] * 2 * mesh.data, *example.shape[1:])
            if example.dtype.is_floating_point:
                batch[key] = torch.randn(shape, generator=generator, dtype=example.dtype)
            else:
                batch[key] = torch.randint(int(example.max()) + 1, shape, generator=generator)
        batches.append(batch)
    options = ADAMW if optimizer == "AdamW" else {"lr": 0.01}
    max_norm = 0.5 if mesh.data > 2 else None
    path = str(folder / f"zero-{zero}")
    assert ("zero=1" in Path(path, "rank_0.py").read_text()) == bool(zero)
    job = Job(path, batches, optimizer=optimizer, options=options, max_norm=max_norm)
    return pool().run(job, program.lowered.grid.size)


@pytest.mark.parametrize(("name", "sizes", "options", "optimizer"), CASES)
def test_shared_updates_are_those_of_every_rank(
    name: str, sizes: tuple[int, int, int], options: dict[str, Any], optimizer: str, tmp_path: Path
) -> None:
    pipeline, tensor, data = sizes
    mesh = pc.Mesh(pipeline=pipeline, tensor=tensor, data=data)
    alone, shared = (outcome(tmp_path, name, mesh, options, z, optimizer) for z in (0, 1))
    assert torch.equal(alone.losses[:1], shared.losses[:1])
    for found, wanted in ((shared.gradients, alone.gradients), (shared.state, alone.state)):
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            if data == 2:  # a + b is b + a; among more the order of the additions is another
                assert torch.equal(found[key], value), key
            else:
                error = (found[key] - value).norm() / value.norm().clamp(min=1e-9)
                assert error <= (2e-3 if "precision" in options else 1e-6), key


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["gpt-tied", "llama", "t5", "resnet", "moe"])
def test_every_mesh_and_schedule_is_exact(name: str) -> None:
    program = captured(name, None)
    schedules = ("gpipe", "1f1b", "zb-h1", "interleaved", "zb-v")
    for pipeline, tensor, data, schedule, vocabulary in product(
        (1, 2), (1, 2), (2, 3, 4), schedules, ("whole", "vocab-2")
    ):
        if pipeline == 1 and (schedule != "1f1b" or vocabulary != "whole"):
            continue
        mesh = pc.Mesh(pipeline=pipeline, tensor=tensor, data=data)
        try:
            found = pc.compile(
                program, mesh, microbatches=4, schedule=schedule, vocabulary=vocabulary, zero=1
            )
        except pc.ParCompilerError as error:
            assert "vocabulary" in str(error), error
            continue
        verification = found.verify(seed=0)
        assert verification.ok, (mesh, schedule, vocabulary, str(verification))
