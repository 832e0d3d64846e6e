"""The norm of the gradients is that of one process on every mesh, and clips as it does there."""

import copy
import dataclasses
import itertools
from functools import cache
from pathlib import Path

import pytest
import torch

import parcompiler as pc
from parcompiler.device import Link, device
from parcompiler.models import gpt
from parcompiler.verification.batches import random_batch
from parcompiler.verification.pool import Job, Outcome, pool
from tests import zoo
from tests.distributed import recipe

MICROBATCHES, STEPS, MOST, RATE = 2, 3, 0.2, 0.5
CHEAP = dataclasses.replace(
    device("cpu"), name="cheap", link=Link(1e13, 1e-10), launch_overhead=1e-9
)  # so that tensor ranks split even tiny models
OFTEN = [(1, 1, 1, "whole"), (2, 1, 1, "vocab-2"), (1, 2, 1, "whole"), (2, 1, 2, "whole")]
MESHES = [
    (*mesh, vocabulary)
    for mesh in itertools.product((1, 2), repeat=3)
    for vocabulary in (("whole", "vocab-1", "vocab-2") if mesh[0] > 1 else ("whole",))
]


def odd() -> zoo.Case:
    """Nothing divides evenly: rows of the vocabulary are padded, pieces differ."""
    torch.manual_seed(0)
    config = gpt.Config(layers=2, heads=3, hidden=15, vocabulary=93, sequence=7, tied=True)
    tokens = torch.randint(93, (2, 7))
    return gpt.GPT(config), {"tokens": tokens, "labels": tokens}


@cache
def captured(name: str) -> pc.Program:
    model, inputs = odd() if name == "odd" else zoo.build(name)
    return pc.compile(model, pc.Mesh(), inputs, microbatches=MICROBATCHES)


def compiled(
    name: str, pipeline: int, tensor: int, data: int, vocabulary: str = "whole"
) -> pc.Program:
    mesh = pc.Mesh(pipeline=pipeline, tensor=tensor, data=data, device=CHEAP)
    return pc.compile(
        captured(name), mesh, microbatches=MICROBATCHES, vocabulary=vocabulary, schedule="1f1b"
    )


def batches(program: pc.Program) -> list[dict[str, torch.Tensor]]:
    """Those of all data ranks, for each step."""
    count = MICROBATCHES * program.plan.mesh.data
    return [random_batch(program.problem.graph, count, seed) for seed in range(STEPS)]


def clipped(program: pc.Program, folder: Path) -> Outcome:
    path = program.export(folder / "program")
    job = Job(str(path), batches(program), options={"lr": RATE}, max_norm=MOST)
    return pool().run(job, program.lowered.grid.size)


def check(name: str, mesh: tuple[int, int, int, str], folder: Path) -> None:
    program = compiled(name, *mesh)
    found = clipped(program, folder)
    model = copy.deepcopy(program.model)
    assert model is not None
    count = MICROBATCHES * mesh[2]
    wanted = recipe.train(
        model, batches(program), count, None, max_norm=MOST, lr=RATE, kind=torch.optim.SGD
    )
    assert found.norms is not None
    assert max(wanted.norms) > MOST, "nothing is clipped"
    norms = torch.tensor(wanted.norms, dtype=torch.float64)
    assert float(((found.norms - norms) / norms).abs().max()) <= 1e-6, (found.norms, norms)
    for key, parameter in model.named_parameters():
        exact = parameter.detach()
        difference = float((found.state[key] - exact).abs().max())
        assert difference <= 1e-5 * float(exact.abs().max()) + 1e-7, key


@pytest.mark.parametrize("mesh", OFTEN, ids=str)
def test_tied_tables_in_rows_pieces_and_copies_count_once(
    mesh: tuple[int, int, int, str], tmp_path: Path
) -> None:
    check("odd", mesh, tmp_path)


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["odd", "gpt-tied", "gpt", "llama", "t5", "resnet", "moe"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_the_norm_of_every_mesh_is_that_of_one_process(
    name: str, mesh: tuple[int, int, int, str], tmp_path: Path
) -> None:
    check(name, mesh, tmp_path)


def test_what_is_split_over_tensor_ranks_is_among_it() -> None:
    rank = compiled("odd", 1, 2, 1).rank_program(1)
    assert rank.shards
    assert rank.tensor == 2
    assert compiled("odd", 2, 1, 2).rank_program(0).tied
    assert compiled("odd", 2, 1, 1, "vocab-2").rank_program(0).rows
