"""Published weights in and out: each rank reads what it holds, and transformers opens what ranks
have trained."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import parcompiler as pc
from tests import zoo
from tests.distributed import checkpoints, forked

MICROBATCHES = 2
Case = tuple[str, pc.Mesh, dict[str, Any]]
CASES: dict[str, Case] = {
    "gpt2": ("hf-gpt2", pc.Mesh(pipeline=2, tensor=2), {"vocabulary": "vocab-2"}),
    "llama": ("hf-llama", pc.Mesh(tensor=3), {"precision": "bf16"}),
    "t5": ("hf-t5", pc.Mesh(pipeline=2, data=2), {"vocabulary": "whole", "zero": 3}),
    "mixtral": ("hf-mixtral", pc.Mesh(tensor=2), {}),
    "qwen3": ("hf-qwen3", pc.Mesh(data=2, tensor=2), {"zero": 1}),
}
NAMED = ("qwen3",)  # whose exports name the folder of weights
PLANS: tuple[tuple[pc.Mesh, dict[str, Any]], ...] = (
    (pc.Mesh(pipeline=2, tensor=2), {"vocabulary": "vocab-2"}),
    (pc.Mesh(data=3), {"zero": 2}),
    (pc.Mesh(tensor=4), {"vocabulary": "whole"}),
)
SWEPT: dict[str, Case] = {
    f"{case[0]}-{number}": (case[0], *plan)
    for case in CASES.values()
    for number, plan in enumerate(PLANS)
}
Folder = Path


def batch(rows: int) -> torch.Tensor:
    """What `checkpoints.Player` makes of seed 5."""
    generator = torch.Generator().manual_seed(5)
    return torch.randint(zoo.VOCABULARY, (rows, zoo.LENGTH), generator=generator)


def rows(mesh: pc.Mesh) -> int:
    return zoo.ROWS * MICROBATCHES * mesh.data


def trained(folder: Folder, cases: dict[str, Case]) -> Folder:
    """Weights by transformers, programs of models without any, and what their ranks wrote."""
    jobs = []
    for name, (model_name, mesh, options) in cases.items():
        torch.manual_seed(1)
        built, inputs = zoo.build(model_name)
        model: Any = built  # of transformers
        kind = torch.bfloat16 if model_name == "hf-t5" else torch.float32
        model.to(kind).save_pretrained(folder / f"{name}-in", max_shard_size="20KB")
        # On the meta device Mixtral counts tokens by an operator that CPUs lack.
        with torch.device("cpu" if model_name == "hf-mixtral" else "meta"):
            empty = type(model)(model.config)
        program = pc.compile(empty, mesh, inputs, microbatches=MICROBATCHES, **options)
        weights = folder / f"{name}-in" if name in NAMED else False
        program.export(folder / name, weights=weights)
        actions = [
            ["count"] if name in NAMED else ["pretrained", f"{name}-in"], ["evaluate", 5],
            ["train", 2], ["publish", f"{name}-out", model.config.to_dict()], ["evaluate", 5],
            ["gather", f"{name}-whole.safetensors"],
        ]  # fmt: skip
        job = {"name": f"{name}-job", "program": name, "ranks": mesh.size, "actions": actions}
        job |= {"high": zoo.VOCABULARY, "length": zoo.LENGTH, "rows": rows(mesh)}
        jobs.append(job | {"itemsize": kind.itemsize})
    (folder / "jobs.json").write_text(json.dumps(jobs))
    forked.run(4, checkpoints.main, str(folder))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return trained(tmp_path_factory.mktemp("pretrained"), CASES)


def opened(folder: Folder, name: str) -> Any:
    """The model that transformers makes of a folder."""
    kind = type(zoo.build(name)[0]).__name__
    model = getattr(importlib.import_module("transformers"), kind)
    return model.from_pretrained(folder, dtype=torch.float32)


def evaluated(model: Any, mesh: pc.Mesh) -> float:
    """The loss of a model on what the ranks have evaluated."""
    losses = [
        model(input_ids=part, labels=part).loss.detach()
        for part in batch(rows(mesh)).split(zoo.ROWS)
    ]
    return float(torch.stack(losses).mean())


@pytest.mark.parametrize("name", CASES)
def test_published_weights_are_trained_and_published(folder: Folder, name: str) -> None:
    check(folder, name, CASES[name])


@pytest.mark.sweep
def test_every_model_is_trained_by_three_plans(tmp_path: Path) -> None:
    trained(tmp_path, SWEPT)
    for name, case in SWEPT.items():
        check(tmp_path, name, case)


def check(folder: Folder, name: str, case: Case) -> None:
    model, mesh, options = case
    files = [folder / f"{name}-job.{rank}.json" for rank in range(mesh.size)]
    ranks = [json.loads(file.read_text()) for file in files]
    assert all(seen["faults"] == [] for seen in ranks)
    assert all(0 < seen["read"] <= 1.05 for seen in ranks)
    before, *_, after = ranks[0]["losses"]
    bound = 2e-2 if options.get("precision") == "bf16" else 1e-5
    one, two = opened(folder / f"{name}-in", model), opened(folder / f"{name}-out", model)
    assert before == pytest.approx(evaluated(one, mesh), rel=bound)
    assert after == pytest.approx(evaluated(two, mesh), rel=bound)
    assert after != before
    assert len([*(folder / f"{name}-out").glob("model-*.safetensors")]) > 1
    assert not [*(folder / f"{name}-out").glob(".*")]
    gathered, _ = zoo.build(model)
    gathered.load_state_dict(load_file(folder / f"{name}-whole.safetensors"))
    ids = batch(zoo.ROWS)
    logits = [each.eval()(input_ids=ids, labels=ids).logits for each in (gathered, two)]
    assert torch.equal(*logits)


def test_a_run_goes_on_when_its_published_weights_are_gone(tmp_path: Path) -> None:
    model: Any = torch.nn.Linear(4, 1)
    published, run = tmp_path / "published", tmp_path / "run"
    published.mkdir()
    save_file(model.state_dict(), published / "model.safetensors")
    inputs = (torch.ones(2, 4),)
    exported = pc.compile(model, pc.Mesh(), inputs, loss=torch.mean, microbatches=1)
    exported.export(tmp_path / "out", weights=published)
    with pc.load(tmp_path / "out").worker() as worker:
        worker.set_optimizer(torch.optim.SGD, lr=0.1)
        worker.train_step(inputs)
        worker.save(run)
        expected = worker.gather_state_dict()
    published.rename(tmp_path / "gone")
    with pc.load(tmp_path / "out").worker() as worker:
        worker.set_optimizer(torch.optim.SGD, lr=0.1)
        uses = (worker.train_step, worker.evaluate, worker.save_pretrained, worker.save)
        for use in uses:
            argument: Any = (
                inputs if use in (worker.train_step, worker.evaluate) else tmp_path / "x"
            )
            with pytest.raises(pc.InputError, match=f"cannot load {published}"):
                use(argument)
        assert worker.load(run) == 1
        found = worker.gather_state_dict()
        assert expected is not None
        assert found is not None
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert worker.train_step(inputs).isfinite()
