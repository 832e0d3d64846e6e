"""The best mesh of a cluster: that of planning every mesh in full; and what is told of each."""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import parcompiler as pc
from parcompiler import meshes
from parcompiler.meshes import EVEN, SCHEDULES, WORK
from parcompiler.meshes.bounds import Bounds
from parcompiler.meshes.space import Candidate
from parcompiler.meshes.weigh import planned
from parcompiler.models import dlrm, gpt
from parcompiler.options import Options
from parcompiler.passes import DEFAULT
from parcompiler.passes.base import MARGIN
from parcompiler.passes.decide import start
from parcompiler.passes.least import least_step
from parcompiler.passes.shard.axes import on_axes
from parcompiler.plan import MeshChoice, Shape
from parcompiler.problem import Problem
from parcompiler.schedules import build
from tests import zoo

BEATEN = {WORK, EVEN, SCHEDULES}
SMALL = gpt.Config(layers=4, heads=2, hidden=16, vocabulary=64, sequence=8, tied=False)
LARGE = dataclasses.replace(SMALL, hidden=512, heads=8, vocabulary=8192, sequence=128)


@functools.cache
def captured(config: gpt.Config, rows: int = 1) -> pc.Program:
    """A GPT without parameters, captured once for many meshes."""
    with torch.device("meta"):
        model = gpt.GPT(config)
    tokens = torch.zeros(rows, config.sequence, dtype=torch.long)
    return pc.compile(model, pc.Mesh(device="h100"), (tokens, tokens), schedule="1f1b")


class Found(NamedTuple):
    """A mesh and a micro-batch that fit."""

    seconds: float
    mesh: pc.Mesh
    rows: int
    plan: pc.Plan


def exhaustive(
    model: pc.Program,
    cluster: pc.Cluster,
    microbatches: int,
    meshes: Sequence[pc.Mesh] | None = None,
    **options: Any,
) -> list[Found]:
    """Every mesh planned in full, nothing left out: those that fit."""
    found, rows = [], model.captured.inputs[0].shape[0]
    for mesh in meshes or cluster.meshes():
        each, left = divmod(microbatches, mesh.data)
        if left == 0:
            given = Options(each, **options)
            problem = Problem(model.problem.graph, mesh, given, explain=False)
            with contextlib.suppress(pc.PlanError, pc.InputError):
                plan, choice = planned(on_axes(problem), DEFAULT)
                found.append(Found(choice.seconds or 0.0, mesh, rows, plan))
    return found


def every_size(
    config: gpt.Config, cluster: pc.Cluster, sizes: Sequence[int], total: int, **options: Any
) -> list[Found]:
    """The same at several rows of a micro-batch, captured for each; the plainest mesh first."""
    found = [
        item
        for rows in sizes
        for item in exhaustive(captured(config, rows), cluster, total // rows, **options)
    ]
    meshes = list(cluster.meshes())
    return sorted(found, key=lambda item: meshes.index(item.mesh))


def fits(memory: int) -> pc.Device:
    """A device with so much memory."""
    return dataclasses.replace(pc.Mesh(device="h100").hardware, memory=memory)


CASES = [
    (SMALL, pc.Cluster(1, 8, "h100"), 16, {"schedule": "1f1b"}),
    (LARGE, pc.Cluster(2, 2, "h100"), 8, {"schedule": "1f1b", "vocabulary": "whole"}),
    (LARGE, pc.Cluster(1, 8, fits(150 * 2**20)), 8, {"schedule": "1f1b", "vocabulary": "whole"}),
]


@pytest.mark.parametrize(("config", "cluster", "microbatches", "options"), CASES)
def test_the_best_mesh_is_that_of_compiling_for_every_mesh(
    config: gpt.Config, cluster: pc.Cluster, microbatches: int, options: dict[str, Any]
) -> None:
    model = captured(config)
    found = pc.compile(model, cluster, microbatches=microbatches, **options)
    every = exhaustive(model, cluster, microbatches, **options)
    check_answer(found, every)
    check_told(found.plan.meshes, every)


@pytest.mark.parametrize(("config", "cluster", "microbatches", "options"), CASES[-1:])
def test_first_plans_that_are_all_refused_are_made_after_all(
    config: gpt.Config,
    cluster: pc.Cluster,
    microbatches: int,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = captured(config)
    before = pc.compile(model, cluster, microbatches=microbatches, **options)
    monkeypatch.setattr("parcompiler.meshes.FIRST", 1.0)
    after = pc.compile(model, cluster, microbatches=microbatches, **options)
    assert after.problem.mesh == before.problem.mesh
    assert after.simulate().step_time == before.simulate().step_time


def check_answer(found: pc.Program, every: list[Found]) -> None:
    """The mesh is the plainest of which a plan takes at most MARGIN longer than any, and so is its
    plan; what is fastest beside it is named."""
    enough = (1 + MARGIN) * min(item.seconds for item in every)
    fast = [item for item in every if item.seconds <= enough]
    best = min(fast, key=lambda item: (item.mesh.pipeline, item.mesh.tensor))
    assert found.problem.mesh == best.mesh
    assert found.simulate().step_time <= enough
    told, following = found.plan.meshes, found.plan.runner_up
    assert told is not None
    assert told[0].seconds == pytest.approx(found.simulate().step_time)
    known = [item.seconds for item in told[1:] if item.reason is None and item.seconds]
    assert (following is not None) or not known
    if following is not None and following.seconds and known:
        assert following.seconds <= min(known)


def check_told(told: tuple[MeshChoice, ...] | None, every: list[Found]) -> None:
    """What is told of every mesh is true: its step, or a bound that its step is not below."""
    assert told is not None
    steps = {(plan.mesh, rows): seconds for seconds, _, rows, plan in every}
    (device,) = {plan.mesh.device for *_, plan in every}
    for item in told:
        degrees = item.pipeline, item.tensor, item.data
        step = steps.get((Shape(*degrees, device, item.context, item.expert), item.rows or 0))
        if item.reason is None:
            assert item.seconds is not None
            assert step is not None
            assert item.seconds == pytest.approx(step, rel=MARGIN)
            assert item.compute is not None
            assert item.exchange is not None
            assert item.idle is not None
            assert item.compute + item.exchange + item.idle == pytest.approx(item.seconds)
        elif item.seconds is not None:
            assert step is None or item.seconds <= step  # a mesh that fits nothing has no step
        else:
            assert step is None
    planned = [item.seconds for item in told[1:] if item.reason is None]
    assert planned == sorted(planned, key=lambda seconds: seconds or 0.0)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(24))
def test_many_clusters_are_searched_as_well_as_exhaustively(seed: int) -> None:
    nodes, each, vocabulary, schedule, rows = list(
        itertools.product((1, 2), (2, 4, 8), (64, 50000), ("auto", "1f1b"), (1, 4))
    )[seed * 2 % 48]
    config = dataclasses.replace(
        LARGE, layers=3 + seed % 4, vocabulary=vocabulary, tied=seed % 2 == 0
    )
    memory = (80 * 10**9, 300 * 2**20, 120 * 2**20)[seed % 3]
    cluster = pc.Cluster(nodes, each, fits(memory))
    model, microbatches = captured(config, rows), 2 * cluster.size
    sizes = (rows, 2 * rows) if seed % 4 < 2 else (rows,)
    every = every_size(config, cluster, sizes, microbatches * rows, schedule=schedule)
    option: Any = sizes[1:] or "given"
    compiled = functools.partial(
        pc.compile, model, cluster, microbatches=microbatches, schedule=schedule, microbatch=option
    )
    if not every:
        with pytest.raises(pc.InfeasibleError, match="fits no mesh of the cluster"):
            compiled()
        return
    found = compiled()
    check_answer(found, every)
    check_told(found.plan.meshes, every)


@pytest.mark.parametrize(("schedule", "rows"), [("1f1b", 1), ("interleaved", 1), ("zb-v", 4)])
def test_no_step_is_below_its_bounds(schedule: str, rows: int) -> None:
    model = captured(dataclasses.replace(LARGE, layers=7), rows)
    waiting = []
    for ranks, microbatches in ((2, 2), (4, 4)):
        program = pc.compile(
            model, pc.Mesh(ranks, device="h100"), microbatches=microbatches, schedule=schedule
        )
        alone = dataclasses.replace(program.problem, mesh=pc.Mesh(device="h100"))
        candidate = Candidate(program.problem.mesh, microbatches, 0)
        bounds = Bounds(alone)
        work, even = bounds.seconds(candidate), least_step(program.problem, start(program.problem))
        assert 0 < work <= even <= program.simulate().step_time
        assert bounds.nbytes(candidate) <= max(program.simulate().peak_memory)
        waiting.append(even > program.report().step.ideal * 1.001)
    assert any(waiting)


@pytest.mark.parametrize(("tensor", "memory"), [(1, 110), (2, 57)])
def test_where_only_zero_3_fits_its_exchange_is_a_bound(tensor: int, memory: int) -> None:
    model = captured(dataclasses.replace(LARGE, layers=7, vocabulary=64))
    device = dataclasses.replace(fits(memory * 2**20), devices_per_node=1)
    mesh = pc.Mesh(1, tensor, 8, device=device)
    program = pc.compile(model, mesh, microbatches=2, schedule="1f1b")
    assert program.plan.zero == 3
    bounds = Bounds(dataclasses.replace(program.problem, mesh=pc.Mesh(device=device)))
    least = bounds.seconds(Candidate(mesh, 2, 0))
    roomy = dataclasses.replace(device, memory=2 * device.memory)
    ample = Bounds(dataclasses.replace(program.problem, mesh=pc.Mesh(device=roomy)))
    alone = ample.seconds(Candidate(dataclasses.replace(mesh, device=roomy), 2, 0))
    even = least_step(program.problem, start(program.problem))
    assert 1.2 * alone < least <= min(even, program.simulate().step_time)


def test_meshes_with_room_for_all_activations_are_told_from_tight_ones() -> None:
    """What is said from the blocks' costs is near the peak of that plan."""
    model = captured(dataclasses.replace(LARGE, layers=8, vocabulary=64))
    mesh = pc.Mesh(2, 1, 4, device="h100")
    program = pc.compile(
        model, mesh, microbatches=8, schedule="1f1b", zero=1, recompute="selective"
    )
    peak = max(program.simulate().peak_memory)

    def is_tight(share: float) -> bool:
        device = dataclasses.replace(program.problem.device, memory=int(share * peak))
        problem = dataclasses.replace(program.problem, mesh=pc.Mesh(device=device))
        alone = problem.selectively(selective=False)
        return Bounds(alone).is_tight(Candidate(dataclasses.replace(mesh, device=device), 8, 0))

    assert [is_tight(share) for share in (0.8, 1.4)] == [True, False]


def test_the_plan_is_one_of_its_mesh() -> None:
    model = captured(SMALL)
    found = pc.compile(model, pc.Cluster(1, 4, "h100"), microbatches=8, schedule="1f1b")
    again = pc.compile(model, found.problem.mesh, plan=pc.Plan.from_json(found.plan.to_json()))
    assert again.plan == found.plan
    assert again.simulate().step_time == found.simulate().step_time
    assert pc.compile(model, found.problem.mesh).plan.meshes is None


def test_the_report_says_which_meshes_were_considered() -> None:
    device = fits(150 * 2**20)
    program = pc.compile(
        captured(LARGE), pc.Cluster(1, 8, device), microbatches=8, schedule="1f1b",
        vocabulary="whole", zero=1,
    )  # fmt: skip
    report = program.report()
    text = report.to_text(160)
    assert "Meshes considered" in text
    alone = "parameters and their states alone are"
    assert any(alone in (item.reason or "") for item in report.plan.meshes or ())
    assert any(why in text for why in BEATEN)
    assert pc.Report.from_json(report.to_json()) == report
    assert report.plan.meshes is not None
    assert report.plan.meshes[0].data == program.problem.mesh.data
    assert report.plan.runner_up == pc.Report.from_json(report.to_json()).plan.runner_up
    if program.plan.runner_up is not None:
        assert "runner-up" in text


def test_without_a_number_every_device_has_four_microbatches() -> None:
    program = pc.compile(captured(SMALL), pc.Cluster(1, 2, "h100"), schedule="1f1b")
    assert program.plan.microbatches * program.plan.mesh.data == 8


def test_a_model_that_fits_no_mesh_says_the_least_memory_and_what_would_help() -> None:
    model = captured(LARGE)
    cluster = pc.Cluster(1, 2, fits(30 * 2**20))
    with pytest.raises(pc.InfeasibleError) as caught:
        pc.compile(model, cluster, microbatches=2, schedule="1f1b", recompute="none")
    said = str(caught.value)
    assert "fits no mesh of the cluster (2 x h100 of 31,457,280 bytes; the least that" in said
    for cure in ("nodes", 'recompute="auto"', "take a larger device (a100-40g"):
        assert cure in said
    enough = int(said.split("that was found is ")[1].split(" bytes")[0].replace(",", ""))
    roomy = pc.Cluster(1, 2, fits(enough))
    pc.compile(model, roomy, microbatches=2, schedule="1f1b", recompute="none")


def test_a_batch_that_few_ranks_can_share_says_so() -> None:
    model = captured(SMALL)
    found = pc.compile(model, pc.Cluster(1, 4, "h100"), microbatches=3, schedule="1f1b")
    assert found.plan.mesh.data == 1
    assert found.plan.meshes is not None
    reasons = [item.reason for item in found.plan.meshes if item.data == 4]
    assert reasons == ["4 data ranks need a number of micro-batches that 4 divides (3 given)"]
    more = pc.compile(model, pc.Cluster(16, 1, "h100"), microbatches=3, schedule="1f1b")
    shared = more.plan.mesh
    assert shared.context * shared.tensor > 1 == shared.data  # ranks share a batch
    with pytest.raises(
        pc.InputError, match="no mesh of the cluster is possible: 512 data ranks need"
    ):
        pc.compile(model, pc.Cluster(512, 1, "h100"), microbatches=3, schedule="1f1b")


def test_tensor_ranks_are_on_several_nodes_where_that_is_faster() -> None:
    cluster = pc.Cluster(2, 2, "h100")
    config = dataclasses.replace(dlrm.PRESETS["mlperf"], tables=(1_000_000,) * 4)
    with torch.device("meta"):
        tables = dlrm.DLRM(config)
    rows = 32_768
    inputs = {
        "numbers": torch.zeros(rows, config.numbers), "labels": torch.zeros(rows),
        "categories": torch.zeros(rows, len(config.tables), dtype=torch.long),
    }  # fmt: skip
    asked: dict[str, Any] = {"microbatches": 1, "optimizer": "sgd", "progress": False}
    model = pc.compile(tables, pc.Mesh(device="h100"), inputs, **asked)
    found = pc.compile(model, cluster, **asked)
    assert found.plan.mesh.tensor == 4
    for mesh in cluster.meshes():
        if mesh.data == 1:
            by_hand = pc.compile(model, mesh, **asked)
            assert found.simulate().step_time < by_hand.simulate().step_time


def test_a_deep_pipeline_is_weighed_where_nothing_else_can_be() -> None:
    model = captured(dataclasses.replace(SMALL, layers=30))
    only = pc.compile(model, pc.Cluster(32, 1, "h100"), microbatches=1, schedule="1f1b")
    assert only.plan.meshes is not None
    assert next(mesh.seconds for mesh in only.plan.meshes if mesh.pipeline == 32)


def test_a_deep_pipeline_is_weighed_like_any_other_mesh() -> None:
    model = captured(dataclasses.replace(SMALL, layers=30))
    found = pc.compile(model, pc.Cluster(32, 1, "h100"), microbatches=32, schedule="1f1b")
    (deep,) = (item for item in found.plan.meshes or () if item.pipeline == 32)
    assert deep.seconds is not None
    assert deep.reason in {None, *BEATEN}
    assert found.plan.mesh.pipeline < 32


def test_an_interrupt_ends_a_search_with_the_best_so_far(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    weigh, asked = meshes.MeshSearch._weigh, list[object]()

    def interrupted(self: meshes.MeshSearch, item: meshes.Unweighed) -> None:
        asked.append(item)
        if len(asked) > after:
            raise KeyboardInterrupt
        weigh(self, item)

    monkeypatch.setattr(meshes.MeshSearch, "_weigh", interrupted)
    model, after = captured(LARGE), 1
    found = pc.compile(model, pc.Cluster(2, 2, "h100"), microbatches=8, schedule="1f1b")
    assert len(asked) == 2
    assert "interrupted: this is the best plan so far (1 meshes planned" in capsys.readouterr().err
    reasons = [item.reason or "" for item in found.plan.meshes or ()]
    assert any(reason.startswith("not weighed: interrupted") for reason in reasons)
    after = 1 - len(asked[:1])
    asked.clear()
    with pytest.raises(KeyboardInterrupt):  # nothing to return yet
        pc.compile(model, pc.Cluster(2, 2, "h100"), microbatches=8, schedule="1f1b")


def test_options_that_no_mesh_can_have_are_refused_by_name() -> None:
    model = captured(SMALL)
    with pytest.raises(pc.InputError, match="recompute matches no block"):
        pc.compile(model, pc.Cluster(1, 2, "h100"), recompute={"no": True}, schedule="1f1b")


def test_meshes_without_data_ranks_are_passed_over_where_states_shall_be_shared_out() -> None:
    model = captured(SMALL)
    found = pc.compile(model, pc.Cluster(1, 2, "cpu"), schedule="1f1b", zero=3).plan
    assert (found.mesh.data, found.zero) == (2, 3)
    reasons = [choice.reason or "" for choice in found.meshes or () if choice.data == 1]
    assert any("only one (data=1)" in reason for reason in reasons), reasons
    with pytest.raises(pc.InputError, match=r"zero=3 .* only one \(data=1\)"):
        pc.compile(model, pc.Cluster(1, 1, "cpu"), schedule="1f1b", zero=3)


def test_a_plan_and_a_cluster_exclude_each_other() -> None:
    model = captured(SMALL)
    with pytest.raises(pc.InputError, match="a plan is for one mesh"):
        pc.compile(model, pc.Cluster(1, 2, "h100"), plan=model.plan)


def test_a_schedule_of_ones_own_goes_with_its_number_of_ranks() -> None:
    model = captured(SMALL)
    own = build("1f1b", 2, 2)
    found = pc.compile(model, pc.Cluster(1, 2, "h100"), microbatches=2, schedule=own)
    assert (found.plan.mesh.pipeline, found.plan.mesh.data) == (2, 1)


def test_meshes_are_weighed_by_measured_times_too() -> None:
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(2)))
    model = pc.compile(layers, pc.Mesh(), (torch.zeros(2, 8),), loss=torch.sum, schedule="1f1b")
    found = pc.compile(model, pc.Cluster(1, 2, "cpu"), schedule="1f1b", costs="measured")
    assert found.plan.meshes is not None
    assert all(mesh.seconds for mesh in found.plan.meshes)


def test_a_model_without_a_vocabulary_is_searched_too() -> None:
    layers = [nn.Linear(8, 8) for _ in range(4)]
    model = nn.Sequential(*layers)
    found = pc.compile(
        model, pc.Cluster(1, 2, "cpu"), (torch.zeros(2, 8),), loss=torch.sum, schedule="1f1b"
    )
    assert found.problem.mesh.size == 2
    assert {item.reason for item in found.plan.meshes or ()} <= {None, *BEATEN}


def test_meshes_whose_stages_share_a_tied_table_are_passed_over_by_pipedream() -> None:
    model = gpt.GPT(dataclasses.replace(SMALL, tied=True))
    tokens = torch.zeros(1, SMALL.sequence, dtype=torch.long)
    cluster = pc.Cluster(devices_per_node=4)
    program = pc.compile(model, cluster, (tokens, tokens), microbatches=8, schedule="pipedream")
    assert program.plan.mesh.pipeline == 1
    reasons = [choice.reason for choice in program.plan.meshes or () if choice.pipeline > 1]
    assert any("copies drift apart" in (reason or "") for reason in reasons), reasons


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("resnet", {"updates": "asynchronous"}, "keeps no statistics that data ranks share"),
        ("gpt", {"updates": "local", "loss_weights": "tokens"}, "take updates='all-reduce'"),
        ("gpt", {"updates": "local", "virtual_stages": 2}, "weighs none with several stages"),
    ],
)
def test_where_no_mesh_can_have_the_options_the_reasons_of_each_are_said(
    name: str, options: dict[str, Any], reason: str
) -> None:
    model, inputs = zoo.build(name)
    cluster = pc.Cluster(nodes=1, devices_per_node=2)
    with pytest.raises(pc.ParcompilerError) as caught:
        pc.compile(model, cluster, inputs, microbatches=6, **options)
    assert reason in "\n".join([str(caught.value), *caught.value.__notes__])
