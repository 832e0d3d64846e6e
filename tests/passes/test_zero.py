"""What data ranks share out: by memory and time, and what cannot be."""

import dataclasses
from typing import Any

import pytest
import torch

import parcompiler as pc
from parcompiler import problem
from parcompiler.device import device
from parcompiler.instruction import COMPUTE, Kind
from parcompiler.models import dlrm, gpt
from parcompiler.passes import decide, estimate, exchange
from parcompiler.passes.base import MARGIN
from parcompiler.passes.forced import division_task
from parcompiler.passes.loads import reserved
from parcompiler.passes.shard.local import local
from parcompiler.prices import collective_seconds
from parcompiler.schedules import build
from tests import zoo

CONFIG = gpt.Config(layers=8, heads=4, hidden=256, vocabulary=512, sequence=64, tied=False)


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """As small beside the model as those of a large one."""
    monkeypatch.setattr(problem, "BUCKET", 2**19)


def compiled(memory: int | None = None, **options: object) -> pc.Program:
    """A GPT whose states are most of its memory, on four data ranks."""
    with torch.device("meta"):
        model = gpt.GPT(CONFIG)
    tokens = torch.zeros(1, CONFIG.sequence, dtype=torch.long)
    mesh = {"data": 4, **options.pop("mesh", {})}  # type: ignore[dict-item]
    kind = device("a100-80g")
    kind = kind if memory is None else dataclasses.replace(kind, memory=memory)
    return pc.compile(
        model, pc.Mesh(**mesh, device=kind), (tokens, tokens), microbatches=2, progress=False,
        **options,  # type: ignore[arg-type]
    )  # fmt: skip


def test_states_stay_whole_where_there_is_room() -> None:
    program = compiled()
    assert program.plan.zero == 0
    report = program.report().to_text()
    assert "Levels of ZeRO with these stages, on 4 data ranks" in report
    assert "zero              0: every data rank holds everything" in report
    text = "\n".join(map(str, program.lowered.instructions[0]))
    assert "GATHER_PARAMETERS" not in text


def test_an_update_that_is_much_of_the_step_is_shared_out() -> None:
    config = dataclasses.replace(CONFIG, layers=2, hidden=2048, sequence=128)
    tokens = torch.zeros(1, config.sequence, dtype=torch.long)
    with torch.device("meta"):
        model = gpt.GPT(config)
    steps = {}
    for count in (1, 32):
        for zero in ("auto", 0, 1):
            mesh = pc.Mesh(data=4, device="a100-80g")
            program = pc.compile(model, mesh, (tokens, tokens), microbatches=count, zero=zero)
            steps[count, zero] = program.simulate().step_time
            if zero == "auto":
                assert program.plan.zero == int(count == 1)
    assert steps[1, "auto"] == steps[1, 1] < 0.98 * steps[1, 0]
    assert steps[32, "auto"] == steps[32, 0] < 1.02 * steps[32, 1]


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("compression", [None, "bf16"])
def test_a_level_exchanges_what_the_lists_do(
    precision: str | None, compression: str | None
) -> None:
    program = compiled(zero=1, precision=precision, compression=compression)
    seconds = collective_seconds(program.problem, program.lowered)
    lists = sum(map(seconds, program.lowered.instructions[0]))
    (level,) = (share for share in program.report().levels if share.level == 1)
    assert level.exchange == pytest.approx(lists, rel=0.05)


@pytest.mark.parametrize("zero", [0, 1])
def test_data_ranks_exchange_their_rows_of_a_vocabulary_on_all_ranks(zero: int) -> None:
    """Sums and gathers were those of whole tables; a step of a recommender came out 4 times as
    long."""
    with torch.device("meta"):
        config = gpt.Config(layers=2, heads=2, hidden=64, vocabulary=65536, sequence=32, tied=False)
        model, tokens = gpt.GPT(config), torch.zeros(1, 32, dtype=torch.long)
    program = pc.compile(
        model, pc.Mesh(2, 2, 2, device="h100"), (tokens, tokens), microbatches=2, zero=zero,
        vocabulary="vocab-1", schedule="1f1b", progress=False,
    )  # fmt: skip
    seconds = collective_seconds(program.problem, program.lowered)
    lists = max(sum(map(seconds, lines)) for lines in program.lowered.instructions)
    (level,) = (share for share in program.report().levels if share.level == zero)
    assert level.exchange == pytest.approx(lists, rel=0.05)


def test_a_bucket_has_a_rank_s_rows_of_a_vocabulary_on_all_ranks() -> None:
    """Room for the gradient of the whole table was kept free on every rank."""
    with torch.device("meta"):
        config = gpt.Config(layers=2, heads=2, hidden=64, vocabulary=65536, sequence=32, tied=False)
        model, tokens = gpt.GPT(config), torch.zeros(1, 32, dtype=torch.long)
    program = pc.compile(
        model, pc.Mesh(2, data=2, device="h100"), (tokens, tokens), microbatches=2, zero=2,
        vocabulary="vocab-1", schedule="1f1b", progress=False,
    )  # fmt: skip
    rows = 65536 // 2 * 64 * 4
    assert local(program.problem, program.plan).bucket_bytes == rows * 3 // 2


@pytest.mark.parametrize("compression", ["bf16", "powersgd"])
def test_a_table_larger_than_a_bucket_is_copied_to_be_compressed(compression: str) -> None:
    options: dict[str, Any] = {"zero": 0, "precision": "fp32", "compression": compression}
    program = compiled(**options)
    sizes = [item.gradient_nbytes for item in program.problem.graph.parameters]
    assert max(sizes) > program.problem.bucket
    (cost,) = estimate.costs(program.problem, program.plan)
    assert cost.update == 2 * max(sizes) <= program.problem.bucket_bytes


def test_states_are_shared_out_where_memory_wants_it() -> None:
    whole, shared = (max(compiled(zero=z).simulate().peak_memory) for z in (0, 1))
    states = 8 * sum(
        item.numel for item in compiled().problem.graph.parameters
    )  # Adam's, in float32
    parts = states / 2 / 4  # of gradients, which the optimizer takes behind whole ones
    assert states * 3 / 4 - parts <= whole - shared <= states * 3 / 4
    tight = compiled(memory=(whole + shared) // 2)
    assert tight.lowered.zero == tight.plan.zero
    assert not tight.plan.recompute
    fits = {share.level: share for share in tight.report().levels if share.fits}
    assert set(fits) == {1, 2, 3}
    least = min(share.step for share in fits.values())
    assert fits[tight.plan.zero or 0].step <= 1.01 * least
    assert compiled(memory=(whole + shared) // 2, plan=tight.plan).plan == tight.plan


def test_recomputing_is_not_worth_it_where_shared_states_do() -> None:
    whole = max(compiled(zero=0).simulate().peak_memory)
    tight = compiled(memory=int(whole * 0.97))
    assert tight.plan.zero
    forced = compiled(memory=int(whole * 0.97), zero=0)
    assert forced.plan.recompute
    assert tight.simulate().step_time < forced.simulate().step_time


def test_gradients_are_shared_out_where_states_alone_do_not_fit() -> None:
    first, second = (max(compiled(zero=z).simulate().peak_memory) for z in (1, 2))
    assert second < first
    tight = compiled(memory=(first + second) // 2)
    assert not tight.plan.recompute
    levels = tight.report().levels
    assert [share.fits for share in levels] == [False, False, True, True]
    assert levels[2].gradients < levels[1].gradients == levels[0].gradients
    assert levels[1].states == levels[2].states < levels[0].states
    assert levels[3].parameters < levels[2].parameters == levels[0].parameters
    assert tight.report().ranks[0].gradients == levels[tight.plan.zero or 0].gradients


def test_a_plan_that_was_made_for_a_level_takes_a_lower_one_that_does() -> None:
    mesh = {"pipeline": 4, "data": 2}
    whole = max(compiled(mesh=mesh).simulate().peak_memory)
    program = compiled(int(0.8 * whole), mesh=mesh, schedule="1f1b")  # it was made for level 2
    assert program.plan.zero == 1
    assert not program.plan.recompute


def test_what_a_level_takes_is_what_a_plan_with_it_takes() -> None:
    levels = compiled().report().levels
    for share in levels:
        forced = compiled(zero=share.level).simulate()
        # Of the third level the lists of a program say more than an estimate: each gather.
        near = 0.02 if share.level < 3 else 0.05
        assert share.memory == pytest.approx(max(forced.peak_memory), rel=near)
        assert share.step == pytest.approx(forced.step_time, rel=near)


@pytest.mark.parametrize("name", ["dlrm", "llama", "resnet"])
def test_small_blocks_are_gathered_with_their_neighbours(name: str) -> None:
    model, inputs = zoo.build(name)
    program = pc.compile(model, pc.Mesh(data=2), inputs, zero=3)
    units, plan = program.lowered.stages, program.plan
    assert 1 < len(units) < sum(len(stage.blocks) for stage in plan.stages or ())
    predicted = estimate.estimate(local(program.problem, plan), plan).peak_memory
    assert predicted == pytest.approx(program.simulate().peak_memory, rel=1e-3)


@pytest.mark.parametrize("schedule", ["zb-h1", "interleaved", "v-half", "zb-v"])
def test_memory_of_stages_with_gathered_parameters_is_that_of_the_lowered_program(
    schedule: str,
) -> None:
    """Units of a rank's other stages are prefetched too, which was left out: up to 12 %."""
    config = gpt.Config(layers=6, heads=8, hidden=512, vocabulary=512, sequence=128)
    with torch.device("meta"):
        model = gpt.GPT(config)
    inputs = {name: torch.zeros(1, 128, dtype=torch.long) for name in ("tokens", "labels")}
    given: Any = {"zero": 3, "precision": "bf16", "microbatches": 8, "vocabulary": "whole"}
    program = pc.compile(model, pc.Mesh(3, 1, 4, device="h100"), inputs, schedule=schedule, **given)
    plan = program.plan
    predicted = estimate.estimate(local(program.problem, plan), plan).peak_memory
    for one, other in zip(predicted, program.simulate().peak_memory, strict=True):
        assert 0.99 <= one / other <= 1.08  # any other stage may be the next


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_what_data_ranks_exchange_is_estimated_as_it_is_lowered(zero: int) -> None:
    """Sums and gathers that no compute hides were up to 17 % of a step off."""
    with torch.device("meta"):
        model = gpt.GPT(gpt.Config(layers=8, heads=16, hidden=1024, vocabulary=1024, sequence=512))
    inputs = {name: torch.zeros(1, 512, dtype=torch.long) for name in ("tokens", "labels")}
    given: Any = {"zero": zero, "precision": "bf16", "microbatches": 8, "vocabulary": "whole"}
    captured = pc.compile(model, pc.Mesh(device="h100"), inputs)
    for schedule in ("gpipe", "zb-h1", "interleaved", "v-half", "zb-v"):
        mesh = pc.Mesh(4, 1, 16, device="h100")
        program = pc.compile(captured, mesh, schedule=schedule, **given)
        estimated = exchange.step_of(local(program.problem, program.plan), program.plan)
        step = program.simulate().step_time
        assert 0.95 * step <= estimated <= 1.01 * step, schedule


def test_orders_that_are_given_are_compared_like_those_of_a_name() -> None:
    with torch.device("meta"):
        model = gpt.GPT(CONFIG)
    tokens = torch.zeros(1, CONFIG.sequence, dtype=torch.long)
    named = build("zb-h1", 2, 40)
    steps, mesh = [], pc.Mesh(2, 1, 2, device="h100")
    for schedule in ("zb-h1", dataclasses.replace(named, name="own")):
        program = pc.compile(
            model, mesh, (tokens, tokens), microbatches=40, schedule=schedule, vocabulary="whole"
        )
        steps.append(exchange.step_of(local(program.problem, program.plan), program.plan))
    assert steps[0] == pytest.approx(steps[1], rel=1e-9)


def test_a_recommender_fits_data_ranks_with_pieces_of_its_tables() -> None:
    config = dlrm.PRESETS["mlperf"]
    with torch.device("meta"):
        numbers, labels = torch.zeros(2048, config.numbers), torch.zeros(2048)
        rows = torch.zeros(2048, len(config.tables), dtype=torch.long)
        model = dlrm.DLRM(config)
    given: dict[str, Any] = {"microbatches": 1, "progress": False}
    mesh = pc.Mesh(data=16, device="a100-80g")
    program = pc.compile(model, mesh, (numbers, rows, labels), optimizer="sgd", **given)
    assert program.plan.zero == 3
    with pytest.raises(pc.InfeasibleError):  # which the passes say, not the verifier
        pc.compile(program, mesh, optimizer="sgd-momentum", **given)


@pytest.mark.parametrize("zero", [1, 2])
def test_updated_parameters_come_beside_the_first_forward(zero: int) -> None:
    program = compiled(zero=zero)
    timeline = program.simulate()
    of_kind = {kind: [x for x in timeline.events if x.instruction.kind is kind] for kind in Kind}
    gathers, forward = of_kind[Kind.GATHER_PARAMETERS], of_kind[Kind.FORWARD][0]
    lines = [x for x in program.lowered.instructions[0] if x.kind is Kind.GATHER_PARAMETERS]
    assert [event.instruction for event in gathers] == lines
    assert len(lines) > 2
    assert 0 == gathers[0].begin < gathers[0].end <= forward.begin  # what it reads first
    assert forward.begin < gathers[-1].begin < gathers[-1].end < forward.end
    waits = timeline.step_time - compiled(zero=0).simulate().step_time
    assert waits < gathers[-1].end


def test_tensors_that_no_operator_reads_count_with_the_first_stage() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))
            self.unused = torch.nn.Parameter(torch.zeros(1000))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x.sum()

    program = pc.compile(
        Model(), pc.Mesh(pipeline=2), (torch.zeros(2, 8),), microbatches=2, progress=False
    )
    plan = program.plan
    found = estimate.estimate(program.problem, plan)
    assert found.peak_memory == program.simulate().peak_memory


def test_a_plan_with_another_level_than_was_asked_for_is_refused() -> None:
    plan = compiled(zero=1).plan
    with pytest.raises(pc.PlanError, match=r"the plan has zero 1 \(asked for: 0\)"):
        compiled(zero=0, plan=plan)
    older = dataclasses.replace(plan, zero=None)  # of a release that had no levels
    assert compiled(plan=older).lowered.zero == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"zero": 1, "mesh": {"data": 1}}, "zero=1 shares states out among data ranks, and"),
        ({"zero": 4}, r"zero must be one of 'auto', 0, 1, 2, 3 \(4 given\)"),
        ({"zero": True}, "zero must be one of"),
        (
            {"zero": 1, "schedule": "pipedream", "mesh": {"pipeline": 2}},
            "pipedream",
        ),
    ],
)
def test_what_cannot_be_shared_out_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(pc.InputError, match=message):
        compiled(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v"])
def test_gathers_are_beside_the_half_of_a_backward_that_needs_them(schedule: str) -> None:
    config = dataclasses.replace(CONFIG, hidden=2048, layers=16, vocabulary=64)
    tokens = torch.zeros(4, config.sequence, dtype=torch.long)
    with torch.device("meta"):
        model = gpt.GPT(config)
    kind = device("a100-80g")  # with a link on which gathers take as long as forwards
    link = dataclasses.replace(kind.link, bandwidth=kind.link.bandwidth / 6)
    mesh = pc.Mesh(pipeline=2, data=2, device=dataclasses.replace(kind, link=link))
    program = pc.compile(
        model, mesh, (tokens, tokens), microbatches=16, schedule=schedule, vocabulary="whole",
        zero=3, progress=False,
    )  # fmt: skip
    step = decide.step_of(program.problem, program.plan)
    assert step == pytest.approx(program.simulate().step_time, rel=0.05)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_the_estimate_agrees_with_the_lists_where_links_are_the_bound(
    zero: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(problem, "BUCKET", 25 * 2**20)
    config = gpt.Config(layers=8, heads=96, hidden=12288, vocabulary=512, sequence=1024, tied=False)
    with torch.device("meta"):
        model = gpt.GPT(config)
    tokens = torch.zeros(1, config.sequence, dtype=torch.long)
    kind = dataclasses.replace(device("a100-80g"), memory=10**12)
    program = pc.compile(
        model, pc.Mesh(data=768, device=kind), (tokens, tokens), microbatches=2, zero=zero,
        precision="bf16", progress=False,
    )  # fmt: skip
    timeline = program.simulate()
    compute = sum(e.end - e.begin for e in timeline.events if e.instruction.kind in COMPUTE)
    assert timeline.step_time > 1.2 * compute
    step = decide.step_of(program.problem, program.plan)
    assert step == pytest.approx(timeline.step_time, rel=0.05)


def test_levels_are_compared_by_lowered_steps() -> None:
    """The gradient of a table was summed three times after the last compute, which no estimate of
    the exchange says: plans of another level were 3.5 % faster, and 3.2 % under `zb-h2`."""
    config = gpt.Config(layers=12, heads=8, hidden=512, vocabulary=32768, sequence=128, tied=True)
    with torch.device("meta"):
        model = gpt.GPT(config)
    tokens = torch.zeros(2, config.sequence, dtype=torch.long)
    small = dataclasses.replace(device("h100"), memory=400 * 2**20)
    mesh = pc.Mesh(pipeline=2, data=4, device=small)
    program = pc.compile(model, mesh, (tokens, tokens), microbatches=4, progress=False)

    def step(**named: Any) -> float:
        found = pc.compile(program, mesh, microbatches=4, progress=False, **named)
        return found.simulate().step_time

    under = step(schedule="zb-h2")
    assert program.simulate().step_time <= (1 + MARGIN) * min(under, step(zero=1))
    assert under <= (1 + MARGIN) * step(schedule="zb-h2", zero=3)


@pytest.mark.parametrize(
    "level", [1, *(pytest.param(k, marks=pytest.mark.sweep) for k in (0, 2, 3))]
)
def test_a_level_is_not_chosen_by_an_estimate_that_is_far_off(level: int) -> None:
    """On slow links the step of `zb-v` was 21 % longer than estimated, and that at level 1 13 %
    shorter."""
    config = dataclasses.replace(CONFIG, layers=6, hidden=512, vocabulary=256, sequence=128)
    with torch.device("meta"):
        model = gpt.GPT(config)
    tokens = torch.zeros(4, config.sequence, dtype=torch.long)
    small = dataclasses.replace(device("l40s"), memory=200 * 10**6)
    mesh = pc.Mesh(pipeline=2, data=4, device=small)
    given: dict[str, Any] = {"microbatches": 3, "progress": False}
    found = pc.compile(model, mesh, (tokens, tokens), **given)
    named = pc.compile(found, mesh, zero=level, **given)
    assert found.simulate().step_time <= (1 + MARGIN) * named.simulate().step_time


def test_stages_are_divided_again_for_the_level_that_is_taken() -> None:
    """Where much exchange is exposed: it was that of level 0 that decided them, and a plan for
    `zero=2` was 4.7 % faster."""
    config = dataclasses.replace(CONFIG, layers=9, hidden=512, vocabulary=256, sequence=128)
    with torch.device("meta"):
        model = gpt.GPT(config)
    tokens = torch.zeros(4, config.sequence, dtype=torch.long)
    fast = dataclasses.replace(device("l40s"), name="fast", memory=1_050_166_284)
    slow = dataclasses.replace(
        fast, name="slow", memory=140_022_171, launch_overhead=1.5e-5,
        flops=tuple((dtype, flops / 3) for dtype, flops in fast.flops),
        memory_bandwidth=fast.memory_bandwidth / 3,
    )  # fmt: skip
    mesh = pc.Mesh(pipeline=2, data=4, device=(slow, fast))
    given: dict[str, Any] = {"microbatches": 3, "progress": False}
    found = pc.compile(model, mesh, (tokens, tokens), **given)
    named = pc.compile(found, mesh, zero=2, **given)
    assert found.simulate().step_time <= (1 + MARGIN) * named.simulate().step_time


@pytest.mark.parametrize("level", [1, 2, 3])
def test_the_solver_counts_what_data_ranks_exchange_once(level: int) -> None:
    config = dataclasses.replace(CONFIG, hidden=512, vocabulary=4096, sequence=512)
    tokens = torch.zeros(1, config.sequence, dtype=torch.long)
    with torch.device("meta"):
        model = gpt.GPT(config)
    program = pc.compile(
        model, pc.Mesh(2, data=4, device="h100"), (tokens, tokens), microbatches=8, zero=level,
        schedule="1f1b", vocabulary="whole", stages="even", recompute="none", progress=False,
    )  # fmt: skip
    own, plan = local(program.problem, program.plan), program.plan
    assert plan.stages is not None
    assert plan.granularity is not None
    home = {name: j for j, choice in enumerate(plan.stages) for name in choice.blocks}
    stage_of = [home[block.name] for block in own.under(plan).cut.blocks]
    task = division_task(own, plan, plan.granularity, is_free=False)
    counted = [size + reserved(own, plan) for size in task.evaluate(stage_of).memory]
    peaks = estimate.estimate(own, plan).peak_memory
    assert all(0.97 <= size / peak <= 1.05 for size, peak in zip(counted, peaks, strict=True))
