"""Data ranks: each trains on its own batch, and all are one process on the whole batch."""

import json
import re
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import parcompiler as pc
from tests import zoo
from tests.distributed import forked, replicas
from tests.distributed.replicas import MICROBATCHES, STEPS, batch
from tests.distributed.test_tensor import CHEAP

CASES = [
    ("gpt-tied", 1, 2, "1f1b", 3),
    ("gpt-tied", 2, 2, "zb-v", 3),
    ("gpt-tied", 1, 4, "1f1b", 1),
    ("t5", 1, 2, "gpipe", 2),
    ("t5", 2, 2, "1f1b", 3),
    ("resnet", 1, 4, "1f1b", 2),
    ("resnet", 2, 2, "interleaved", 2),
    ("gpt-dropout", 1, 4, "1f1b", 2),
    ("gpt-dropout", 2, 2, "interleaved", 3),
    ("hf-gpt2", 1, 2, "1f1b", 2),
    ("hf-gpt2", 2, 2, "auto", 2),
    ("hf-gpt2", 4, 2, "zb-h1", 4),
]
# For each way to fail, what the rank that failed says and what the others say.
WAYS = {
    "a batch of another size on data rank 1": (
        "InputError: batch['tokens'] must have shape (4, 12)",
        "because rank 1 refused its batch: InputError: batch['tokens']",
    ),
    "exception in a module on rank 3": (
        "LaunchError: rank 3 failed at 'FORWARD stage 1 mb 0'",
        "because rank 3 failed at 'FORWARD stage 1 mb 0': ValueError: boom",
    ),
    "death of rank 2": ("", "LaunchError: rank"),
}
Ranks = list[dict[str, Any]]


@pytest.mark.parametrize(("name", "pipeline", "data", "schedule", "microbatches"), CASES)
def test_the_mean_over_data_ranks_equals_one_process(
    name: str, pipeline: int, data: int, schedule: str, microbatches: int
) -> None:
    mesh = pc.Mesh(pipeline=pipeline, data=data)
    program = pc.compile(zoo.captured(name), mesh, schedule=schedule, microbatches=microbatches)
    found = program.verify()
    assert found.ok, str(found)
    assert max(found.loss_error, found.gradient_error, found.parameter_error) <= 1e-9


@pytest.mark.parametrize(("pipeline", "tensor"), [(1, 1), (2, 2)])
def test_synchronized_norms_count_the_batches_of_all_data_ranks(
    pipeline: int, tensor: int, tmp_path: Path
) -> None:
    model, inputs = zoo.build("resnet")
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    mesh = pc.Mesh(pipeline=pipeline, tensor=tensor, data=2, device=CHEAP)
    program = pc.compile(model, mesh, inputs, microbatches=2)
    text = (program.export(tmp_path / "out", weights=False) / "stage_0.py").read_text()
    assert "runtime.sync_batch_norm(" in text and "F.batch_norm(" not in text
    found = program.verify()
    assert found.ok, str(found)
    assert max(found.loss_error, found.gradient_error, found.parameter_error) <= 1e-9


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Standalone exports of a GPT and a ResNet for two pipeline coordinates of two data ranks."""
    made = tmp_path_factory.mktemp("data")
    for name in replicas.NAMES:
        mesh = pc.Mesh(pipeline=2, data=2)
        program = pc.compile(
            zoo.captured(name), mesh, schedule="1f1b", microbatches=MICROBATCHES, precision="fp64"
        )
        program.export(made / name, standalone=True)
    return made


@pytest.fixture(scope="module")
def ranks(folder: Path) -> Ranks:
    """What the four ranks saw."""
    forked.run(4, replicas.main, str(folder))
    return [torch.load(folder / f"rank_{rank}.pt", weights_only=False) for rank in range(4)]


@cache
def one_process(name: str) -> dict[str, Any]:
    """The same training as a user would write it, on the batches of both data ranks.

    `buffers` are those after the first batch of the first data rank alone.
    """
    model, inputs = zoo.build(name)
    model.double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for seed in range(STEPS):
        parts = [step(model, inputs, 2 * seed + k) for k in range(2)]
        losses.append(torch.stack(parts).mean())
        optimizer.step()
        optimizer.zero_grad()
    first = zoo.build(name)[0].double()
    step(first, inputs, 0)
    return {
        "losses": torch.stack(losses),
        "parameters": {key: p.detach().clone() for key, p in model.named_parameters()},
        "buffers": dict(first.named_buffers()),
    }


def step(model: nn.Module, inputs: dict[str, torch.Tensor], seed: int) -> torch.Tensor:
    """Accumulate the gradients of one data rank's half of the mean; its mean loss."""
    losses = []
    whole = batch(inputs, seed)
    for i in range(MICROBATCHES):
        loss = model(**{key: tensor.chunk(MICROBATCHES)[i] for key, tensor in whole.items()})
        (loss / (2 * MICROBATCHES)).backward()
        losses.append(loss.detach())
    return torch.stack(losses).mean()


@pytest.mark.parametrize("name", replicas.NAMES)
def test_training_steps_equal_one_process_on_the_whole_batch(name: str, ranks: Ranks) -> None:
    wanted = one_process(name)
    for rank in ranks:
        assert torch.equal(rank[name]["losses"], ranks[0][name]["losses"])
    assert torch.allclose(ranks[0][name]["losses"], wanted["losses"], rtol=1e-9, atol=0)
    whole = ranks[0][name]["whole"]
    assert all(rank[name]["whole"] is None for rank in ranks[1:])
    for key, tensor in wanted["parameters"].items():
        assert torch.allclose(whole[key], tensor, rtol=1e-6, atol=1e-9), key


@pytest.mark.parametrize("name", replicas.NAMES)
def test_data_ranks_keep_the_same_parameters_bit_for_bit(name: str, ranks: Ranks) -> None:
    for first, second in ((0, 1), (2, 3)):
        one, other = ranks[first][name]["own"], ranks[second][name]["own"]
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)
    assert ranks[0][name]["evaluation"] == ranks[3][name]["evaluation"]


def test_running_statistics_are_those_of_the_first_data_rank(ranks: Ranks) -> None:
    first = ranks[0]["resnet"]["first"]
    for key, buffer in one_process("resnet")["buffers"].items():
        assert torch.allclose(first[key], buffer, rtol=1e-9), key


@pytest.mark.parametrize("name", replicas.NAMES)
def test_sums_start_where_gradients_are_final_and_a_trace_has_them(name: str, ranks: Ranks) -> None:
    for rank in ranks:
        trace = rank[name]["trace"]
        texts = [text for text, *_ in trace]
        sums = [k for k, text in enumerate(texts) if text.startswith("REDUCE_GRADIENTS bucket")]
        last = max(k for k, text in enumerate(texts) if text.startswith("BACKWARD"))
        assert sums and min(sums) > last
        assert all(a[2] <= b[1] for a, b in pairwise(trace))


def test_an_export_trains_and_data_ranks_take_batches_in_turn(folder: Path) -> None:
    out, rows = folder / "gpt-tied", 2 * MICROBATCHES * zoo.ROWS
    parts = [batch(zoo.build("gpt-tied")[1], seed) for seed in range(4)]
    data = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
    assert data["tokens"].shape[0] == 2 * rows
    save_file(data, out / "data.safetensors")
    arguments = ["--steps", "2", "--data", str(out / "data.safetensors"), "--lr", "0.001"]
    text = forked.run(4, forked.script, str(out / "main.py"), *arguments)
    printed = [float(number) for number in re.findall(r"step \d+ loss ([\d.]+)", text)]
    wanted = one_process("gpt-tied")["losses"][:2]
    assert torch.allclose(torch.tensor(printed, dtype=torch.float64), wanted, rtol=0, atol=1e-7)
    scripts = sorted(path.name for path in out.glob("*_*.py"))
    assert scripts == [*(f"rank_{r}.py" for r in range(4)), "stage_0.py", "stage_1.py"]
    save_file({key: t[: rows - 1] for key, t in data.items()}, out / "short.safetensors")
    text = forked.run(
        4, forked.script, str(out / "main.py"), "--data", str(out / "short.safetensors"), ok=False
    )
    short = f"({rows - 1} of {rows}: {rows // 2} for each data rank)"
    assert f"the data has fewer samples than a step takes {short}" in text


def test_a_loaded_program_has_the_instructions_of_every_rank(folder: Path) -> None:
    loaded = pc.load(folder / "gpt-tied")
    assert "SEND" in str(loaded.instructions(1)) and " to 3" in str(loaded.instructions(1))
    assert "REDUCE_GRADIENTS bucket_1 ranks 2,3" in str(loaded.instructions(3))
    with pytest.raises(pc.InputError, match="no rank 4"):
        loaded.instructions(4)


@pytest.fixture(scope="module")
def raised(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, str]]]:
    """What each rank raised, for each way to fail."""
    mesh = pc.Mesh(pipeline=2, data=2)
    program = pc.compile(zoo.captured("gpt"), mesh, microbatches=2, schedule="1f1b")
    made = program.export(tmp_path_factory.mktemp("failing") / "out")
    text = forked.run(4, replicas.main, str(made), *WAYS)
    found: dict[str, list[dict[str, str]]] = {way: [] for way in WAYS}
    for line in text.splitlines():
        if line.startswith("{"):
            answer = json.loads(line)
            found[answer["way"]].append(answer)
    return found


@pytest.mark.parametrize("way", WAYS)
def test_all_ranks_stop_within_seconds_and_name_the_cause(
    way: str, raised: dict[str, list[dict[str, str]]]
) -> None:
    own, others = WAYS[way]
    texts = [answer["raised"] for answer in raised[way]]
    assert len(texts) == 4
    assert any(own in text for text in texts), texts
    assert sum(others in text for text in texts) == 3, texts
    assert all(float(answer["s"]) < 20 for answer in raised[way])
