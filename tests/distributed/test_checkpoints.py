"""Runs that were saved go on as if they had not been interrupted, under the plan that they had bit
for bit, and under any other from the same tensors."""

import functools
import itertools
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import parcompiler as pc
from parcompiler.models import gpt
from parcompiler.runtime.checkpoint import folder as folders
from parcompiler.temporary import threads
from parcompiler.verification.data_ranks import DataRanks
from parcompiler.verification.reference import Original
from tests.cli import models
from tests.distributed import checkpoints, forked

VOCABULARY, LENGTH, ROWS = 29, 6, 16  # rows of a step: of all micro-batches and data ranks
STEPS = 2  # before and behind an interruption


class Normed(nn.Module):
    """Its statistics are those of each data rank's own batches."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, VOCABULARY)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embedding(tokens).flatten(0, 1))
        return F.cross_entropy(self.head(x), labels.flatten())


class Scaled(gpt.GPT):
    """Among its parameters is a scalar."""

    def __init__(self, config: gpt.Config) -> None:
        super().__init__(config)
        self.factor = nn.Parameter(torch.tensor(1.25))

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(tokens, labels) * self.factor


@cache
def programs(
    rows: int, dropout: float, precision: str | None, *, tied: bool, normed: bool
) -> pc.Program:
    """A model that is captured, which cases compile for their meshes."""
    torch.manual_seed(0)
    config = gpt.Config(
        layers=4, heads=3, hidden=12, vocabulary=VOCABULARY, sequence=LENGTH,
        tied=tied, dropout=dropout,
    )  # fmt: skip
    ids = torch.randint(VOCABULARY, (rows, LENGTH))
    inputs = {"tokens": ids, "labels": ids}
    model = Normed() if normed else Scaled(config)
    return pc.compile(model, pc.Mesh(), inputs, precision=precision, progress=False)


@dataclass(frozen=True)
class Case:
    """A program: its mesh, and the options of `compile`."""

    pipeline: int = 1
    data: int = 1
    tensor: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    dropout: float = 0.0
    optimizer: str = "AdamW"
    tied: bool = True
    normed: bool = False

    @property
    def ranks(self) -> int:
        return self.pipeline * self.data * self.tensor

    def compiled(self) -> pc.Program:
        captured = programs(
            ROWS // 4 // self.data, self.dropout, self.options.get("precision"),
            tied=self.tied, normed=self.normed,
        )  # fmt: skip
        mesh = pc.Mesh(pipeline=self.pipeline, data=self.data, tensor=self.tensor)
        options = {"vocabulary": "whole", "stages": "even", "progress": False, **self.options}
        return pc.compile(captured, mesh, microbatches=4, **options)

    def export(self, path: Path) -> None:
        self.compiled().export(path)

    def job(self, name: str, program: str, *actions: Any, **more: Any) -> dict[str, Any]:
        return {
            "name": name, "program": program, "ranks": self.ranks, "actions": actions,
            "optimizer": self.optimizer, "high": VOCABULARY, "length": LENGTH, "rows": ROWS, **more,
        }  # fmt: skip


RESUMED = {
    "vocab-2": Case(4, options={"vocabulary": "vocab-2"}, dropout=0.1),
    "interleaved": Case(
        2, 2, options={"schedule": "interleaved", "virtual_stages": 2}, dropout=0.1
    ),
    "tensor": Case(2, 1, 2, dropout=0.1, options={"schedule": "1f1b"}),
    "fp16": Case(
        2, options={"precision": "fp16", "schedule": "zb-h1"}, dropout=0.1, optimizer="RAdam"
    ),
    "pipedream": Case(2, options={"schedule": "pipedream"}, optimizer="SGD", tied=False),
}
RESUMED["statistics"] = Case(1, 2, optimizer="SGD", normed=True)
RESUMED["zero"] = Case(1, 4, options={"zero": 1, "precision": "bf16"}, dropout=0.1)
RESUMED["rounds"] = Case(2, 2, options={"updates": "local", "every": 3}, dropout=0.1)
RESUMED["round"] = Case(1, 2, options={"updates": "local", "every": 1}, optimizer="SGD")
RESUMED["server"] = Case(1, 4, options={"updates": "parameter-server"}, dropout=0.1)
RESUMED["factors"] = Case(2, 2, options={"compression": "powersgd", "compression_rank": 2})
RESUMED["zero-whole"] = Case(2, 2, options={"zero": 2}, optimizer="Adafactor")
RESUMED["zero-pieces"] = Case(1, 4, options={"zero": 3, "precision": "bf16"}, dropout=0.1)
SERVED = {
    "served": Case(1, 2, options={"updates": "asynchronous", "staleness": 1}),
    "alone": Case(),
}
WIDE = {"precision": "fp64"}
DIVIDED = {
    "one": Case(options=WIDE),
    "vocab": Case(2, 1, 2, options={"vocabulary": "vocab-2", **WIDE}),
    "uneven": Case(1, 1, 3, options=WIDE),
    "replicas": Case(2, 2, options={"vocabulary": "whole", "zero": 0, **WIDE}),
    "shared": Case(2, 2, options={"vocabulary": "vocab-2", "zero": 1, **WIDE}),
    "sharded": Case(2, 2, options={"vocabulary": "whole", "zero": 3, **WIDE}),
}
MORE = {
    "pieces": Case(2, 1, 2, options={"vocabulary": "whole", **WIDE}),
    "stages": Case(4, options={"vocabulary": "whole", "schedule": "1f1b", **WIDE}),
    "two": Case(2, options={"schedule": "gpipe", **WIDE}),
    "v": Case(2, options={"schedule": "zb-v", "virtual_stages": 2, **WIDE}),
    "rows": Case(4, options={"vocabulary": "vocab-1", **WIDE}),
    "line": Case(1, 1, 4, options=WIDE),
    "copies": Case(1, 2, 2, options=WIDE),
    "four": Case(1, 4, options=WIDE),
}
CYCLE = [*itertools.pairwise([*DIVIDED, next(iter(DIVIDED))])]


class Played:
    """The folder of jobs that were played, and what they saw."""

    def __init__(self, folder: Path, cases: dict[str, Case], jobs: Iterable[dict[str, Any]]):
        self.folder = folder
        for name, case in cases.items():
            case.export(folder / name)
        (folder / "jobs.json").write_text(json.dumps([*jobs]))
        forked.run(4, checkpoints.main, str(folder))

    def seen(self, job: str, rank: int = 0) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / f"{job}.{rank}.json").read_text())
        return found

    def losses(self, *jobs: str) -> list[float]:
        for job in jobs:
            assert self.seen(job)["faults"] == []
        return [loss for job in jobs for loss in self.seen(job)["losses"]]

    def checkpoint(self, name: str) -> folders.Checkpoint:
        path = folders.find(self.folder / name)
        assert folders.damaged(path) == []
        return folders.read(path)


def assert_equal(one: folders.Checkpoint, two: folders.Checkpoint) -> None:
    """The same tensors and the same numbers, to the bit."""
    names = {name for name in one.entries if not name.startswith("extra/")}
    assert names == {name for name in two.entries if not name.startswith("extra/")}
    for name in names:
        assert torch.equal(one.whole(name), two.whole(name)), name
    for name in ("step", "scale"):
        assert one.facts[name] == two.facts[name]
    assert one.facts["optimizer"]["values"] == two.facts["optimizer"]["values"]


def resumed_jobs(cases: dict[str, Case]) -> Iterable[dict[str, Any]]:
    for name, case in cases.items():
        more = {"scale": 2.0**20} if name == "fp16" else {}
        yield case.job(
            f"{name}-straight",
            name,
            ["train", 2 * STEPS],
            ["save", f"{name}/ends"],
            ["evaluate", 9],
            **more,
        )
        yield case.job(f"{name}-first", name, ["train", STEPS], ["save", f"{name}/mids"], **more)
        yield case.job(
            f"{name}-second", name,
            ["load", f"{name}/mids"], ["train", STEPS], ["save", f"{name}/again"],
            ["evaluate", 9], seed=77,
        )  # fmt: skip


def divided_jobs(pairs: Iterable[tuple[str, str]]) -> Iterable[dict[str, Any]]:
    """Every plan trains, is saved, and goes on; the second of each pair loads that of the first."""
    cases = DIVIDED | MORE
    pairs = [*pairs]
    for name in dict.fromkeys(name for pair in pairs for name in pair):
        yield cases[name].job(
            f"{name}-own", name, ["train", STEPS], ["save", f"ck/{name}"], ["train", 1]
        )
    for one, two in pairs:
        yield cases[two].job(
            f"{one}-{two}", two, ["load", f"ck/{one}"], ["save", f"ck/{one}-{two}"], ["train", 1],
            no_loader=True,
        )  # fmt: skip


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    jobs = [*resumed_jobs(RESUMED), *divided_jobs(CYCLE), *failing_jobs(), *script_jobs()]
    jobs += [*elastic_jobs(), *served_jobs()]
    return Played(tmp_path_factory.mktemp("checkpoints"), RESUMED | SERVED | DIVIDED, jobs)


def served_jobs() -> Iterable[dict[str, Any]]:
    """A run whose data ranks do not wait for each other, interrupted; and another plan's."""
    actions: dict[str, list[Any]] = {
        "first": [["train", STEPS], ["save", "served/mids"]],
        "second": [
            ["load", "served/mids"], ["save", "served/same"],
            ["train", STEPS], ["save", "served/ends"],
        ],
        "alone": [["load", "served/mids"], ["save", "served/alone"], ["train", 1]],
    }  # fmt: skip
    for name, played in actions.items():
        program = "alone" if name == "alone" else "served"
        more = {"gamma": 1.0, "no_loader": name == "alone"}
        yield SERVED[program].job(f"served-{name}", program, *played, **more)


def failing_jobs() -> Iterable[dict[str, Any]]:
    case = DIVIDED["vocab"]
    yield case.job(
        "failing", "vocab",
        ["train", 1], ["save", "f", {"asynchronous": True}],
        ["train", 1], ["save", "f", {"keep": 2}], ["fill_disk", 1], ["train", 1],
        ["save", "f", {"keep": 1}], ["save", "f", {"asynchronous": True}], ["train", 1],
        ["save", "f", {"asynchronous": True}], ["empty_disk"], ["save", "g"],
        ["damage", "g/*/rank_2.safetensors"], ["load", "g"], ["load", "nowhere"],
        ["save_nowhere", 1], ["load", "f"], ["train", 1],
    )  # fmt: skip


def script_jobs() -> Iterable[dict[str, Any]]:
    """An emitted script that is preempted, goes on, and one that nobody has disturbed; whatever
    their processes have drawn before."""
    steps = ["--steps", "4", "--seed", "3"]
    for name, script, arguments, more in (
        ("preempted", "s", steps, {"terminated": 1}),
        ("going-on", "s", ["--steps", "4", "--resume", "auto", "--keep", "1"], {"seed": 5}),
        ("undisturbed", "u", steps, {"seed": 6}),
    ):
        yield RESUMED["vocab-2"].job(name, "vocab-2", script=script, arguments=arguments, **more)


MODEL = f"{Path(models.__file__)}:make"
ELASTIC = {4: "pipeline=2,data=2", 2: "tensor=2", 3: "data=3"}  # 12 samples a step


def elastic_jobs() -> Iterable[dict[str, Any]]:
    """A run that loses two of its four ranks, and gets one back; and one that nobody disturbs."""
    steps = 0
    for ranks, mesh in ELASTIC.items():
        from_checkpoint = ["--checkpoint", "elastic"] if steps else ["--microbatches", "3"]
        more = [] if steps else ["--precision", "fp64", "--schedule", "1f1b"]
        yield {
            "name": f"plan-{ranks}",
            "command": [
                "compile", MODEL, "--mesh", mesh, "--export", f"on-{ranks}", "--no-weights"
                if steps else "--weights", *from_checkpoint, *more, "--format", "json",
            ],
        }  # fmt: skip
        if not steps:
            yield elastic_job(ranks, "whole", 6)
        steps += 2
        yield elastic_job(ranks, "elastic", steps)
    for name, arguments in {
        "unnamed": ["--checkpoint", "elastic", "--mesh", "data=2"],
        "uneven": [MODEL, "--checkpoint", "elastic", "--mesh", "data=5"],
        "other": [MODEL.replace(":make", ":larger"), "--checkpoint", "elastic", "--mesh", "data=1"],
    }.items():
        yield {"name": name, "command": ["plan", *arguments, "--quiet"]}


def elastic_job(ranks: int, run: str, steps: int) -> dict[str, Any]:
    arguments = ["--steps", str(steps), "--seed", "4", "--resume", "auto"]
    return {
        "name": f"{run}-{ranks}", "program": f"on-{ranks}", "ranks": ranks, "script": run,
        "arguments": arguments,
    }  # fmt: skip


def test_a_run_goes_on_with_fewer_ranks_and_with_more(played: Played) -> None:
    plans = [json.loads(played.seen(f"plan-{ranks}")["output"])["plan"] for ranks in ELASTIC]
    sizes = [plan["mesh"]["data"] * plan["microbatches"] for plan in plans]
    assert sizes == [6, 6, 6]
    assert [plan["precision"] for plan in plans] == ["fp64"] * 3
    assert plans[0]["schedule"] == "1f1b"
    for ranks in ELASTIC:
        codes = [played.seen(f"elastic-{ranks}", rank)["code"] for rank in range(ranks)]
        assert codes == [0] * ranks
    elastic, whole = played.checkpoint("elastic"), played.checkpoint("whole")
    assert (elastic.step, elastic.facts["samples"]) == (6, 72) == (whole.step, 72)
    assert [elastic.facts["mesh"], whole.facts["mesh"]] == [[1, 3, 1], [2, 2, 1]]
    for name in whole.entries:
        torch.testing.assert_close(elastic.whole(name), whole.whole(name), rtol=1e-9, atol=1e-12)
    saved = elastic.facts["request"]
    assert saved["model"] == MODEL
    assert saved["options"] == {"precision": "fp64", "schedule": "1f1b"}


def test_a_checkpoint_that_cannot_be_planned_for_says_why(played: Played) -> None:
    said = {name: played.seen(name) for name in ("unnamed", "uneven", "other")}
    assert all(one["code"] == 2 for one in said.values())
    assert (
        "no code of a checkpoint is run: give MODEL, as in parcompiler compile"
        in said["unnamed"]["errors"]
    )
    assert "a step takes 12 samples, which 5 data ranks cannot share" in said["uneven"]["errors"]
    assert "is of another model: 'embedding.weight' has the shape" in said["other"]["errors"]


def test_sigterm_on_one_rank_ends_all_of_them_with_a_checkpoint(played: Played) -> None:
    assert [played.seen("preempted", rank)["code"] for rank in range(4)] == [143] * 4
    assert [played.seen("going-on", rank)["code"] for rank in range(4)] == [0] * 4
    assert [path.name for path in folders.complete(played.folder / "s")] == ["step_00000004"]
    assert_equal(played.checkpoint("s"), played.checkpoint("u"))
    assert played.checkpoint("u").facts["seeds"] == [3] * 4


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_is_the_straight_one_to_the_bit(played: Played, name: str) -> None:
    check_resumed(played, name)


def check_resumed(played: Played, name: str) -> None:
    straight = played.losses(f"{name}-straight")  # and an evaluation
    assert straight == played.losses(f"{name}-first", f"{name}-second")
    ends, again = played.checkpoint(f"{name}/ends"), played.checkpoint(f"{name}/again")
    assert_equal(ends, again)
    assert ends.facts["extra"] == again.facts["extra"]
    assert ends.facts["seeds"] == again.facts["seeds"]


def test_an_asynchronous_run_goes_on_and_is_repeated_from_its_record_to_the_bit(
    played: Played,
) -> None:
    played.losses(*(f"served-{name}" for name in ("first", "second", "alone")))
    mids, same, ends, alone = (
        played.checkpoint(f"served/{name}") for name in ("mids", "same", "ends", "alone")
    )
    assert_equal(mids, same)
    early, record = (one.whole("rank 0 arrivals/").tolist() for one in (mids, ends))
    assert record[: len(early)] == early
    assert [record.count(r) for r in (0, 1)] == [2 * STEPS] * 2
    program, batches = SERVED["served"].compiled(), []
    for seed in range(2 * STEPS):
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator)
        batches.append({item.key: rows for item in program.problem.graph.inputs})
    optimizer = functools.partial(torch.optim.AdamW, lr=1e-2)
    with threads(1), Original(program, 0, None) as original:
        again = DataRanks(original, program.lowered, optimizer).in_order(batches, record).state
    stored = {name.removeprefix("model/") for name in ends.entries if name.startswith("model/")}
    assert stored
    for name in stored:
        assert torch.equal(ends.whole(f"model/{name}"), again[name]), name
        assert torch.equal(alone.whole(f"model/{name}"), mids.whole(f"model/{name}")), name


def test_statistics_of_data_ranks_are_kept_apart(played: Played) -> None:
    checkpoint = played.checkpoint("statistics/ends")
    one, two = (checkpoint.whole(f"{key}/norm.running_mean") for key in ("model", "data 1"))
    assert not torch.equal(one, two)
    assert "data 1/norm.num_batches_tracked" not in checkpoint.entries
    evaluations = [played.losses(f"statistics-{job}")[-1] for job in ("straight", "second")]
    assert evaluations[0] == evaluations[1]


def test_the_scale_of_the_loss_was_halved_before_and_goes_on(played: Played) -> None:
    assert played.checkpoint("fp16/mids").facts["scale"][0] < 2.0**20


@pytest.mark.parametrize(("one", "two"), CYCLE)
def test_any_plan_goes_on_from_a_checkpoint_of_any_other(
    played: Played, one: str, two: str
) -> None:
    check(played, one, two)


def check(played: Played, one: str, two: str) -> None:
    assert_equal(played.checkpoint(f"ck/{one}"), played.checkpoint(f"ck/{one}-{two}"))
    (loss,) = played.losses(f"{one}-{two}")
    assert loss == pytest.approx(played.losses(f"{one}-own")[STEPS], rel=1e-9)


def test_every_byte_is_written_once_and_by_all_ranks(played: Played) -> None:
    for name in ("replicas", "vocab"):
        checkpoint = played.checkpoint(f"ck/{name}")
        sizes = [path.stat().st_size for path in checkpoint.path.glob("*.safetensors")]
        assert len(sizes) == 4
        stored = sum(entry.bytes for entry in checkpoint.entries.values())
        assert sum(sizes) <= stored + 4 * 20_000  # headers
        assert max(sizes) <= 1.5 * min(sizes)
        boxes = sum(p.box.count for e in checkpoint.entries.values() for p in e.pieces)
        assert boxes == sum(torch.Size(e.shape).numel() for e in checkpoint.entries.values())


def test_what_cannot_be_written_or_read_is_said_on_every_rank_and_loses_nothing(
    played: Played,
) -> None:
    said = [played.seen("failing", rank)["faults"] for rank in range(4)]
    written, beside, damaged, nowhere, no_path = said[0]
    assert re.fullmatch(
        r"InputError: cannot write .*/step_\d+:\nrank 1: No space left on device", written
    )
    assert beside.startswith("InputError: the last checkpoint, ")
    assert "rank 1: No space left on device" in beside
    assert "rank_2.safetensors is damaged" in damaged
    assert "no checkpoint in" in nowhere
    assert "rank 1: None is no path" in no_path
    assert all(one == said[0] for one in said)
    losses = played.seen("failing")["losses"]
    assert losses[-1] == losses[2]  # of the newest complete one
    names = sorted(path.name for path in (played.folder / "f").iterdir())
    assert names == ["step_00000001", "step_00000002"]


@pytest.mark.sweep
def test_any_of_twelve_plans_goes_on_from_any_other(tmp_path: Path) -> None:
    cases = DIVIDED | MORE
    pairs = [*itertools.permutations(cases, 2)]
    played = Played(tmp_path, cases, divided_jobs(pairs))
    for one, two in pairs:
        check(played, one, two)
