"""The other ways of the data axis: exact as they say, on ranks that run the emitted scripts."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker

import parcompiler as pc
from parcompiler.data_updates import ALL_REDUCE
from parcompiler.instruction import Kind
from parcompiler.models import gpt
from parcompiler.runtime import compression
from parcompiler.runtime.channels import Channels
from parcompiler.runtime.powersgd import PowerSGD
from parcompiler.verification import data_ranks
from parcompiler.verification.batches import random_batch
from parcompiler.verification.pool import Job, pool
from parcompiler.verifier import verify
from tests import zoo
from tests.distributed import forked, stepping


@cache
def captured(tied: bool, precision: str | None) -> pc.Program:
    """A model that is compiled for one rank, so that other meshes need not capture it again."""
    torch.manual_seed(0)
    config = gpt.Config(layers=2, heads=2, hidden=8, vocabulary=16, sequence=4, tied=tied)
    tokens = torch.randint(config.vocabulary, (2, config.sequence + 1))
    batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}
    return pc.compile(gpt.GPT(config), pc.Mesh(), batch, precision=precision, progress=False)


def compiled(mesh: dict[str, Any], *, tied: bool = False, **options: Any) -> pc.Program:
    options = {"microbatches": 2, "progress": False, **options}
    return pc.compile(captured(tied, options.get("precision")), pc.Mesh(**mesh), **options)


def exact(program: pc.Program, tmp_path: Path, *words: str) -> Any:
    """Its verification, once the emitted script says what is meant."""
    script = (program.export(tmp_path / "out") / "rank_0.py").read_text()
    for text in words:
        assert text in script, text
    verification = program.verify()
    assert verification.ok, str(verification)
    assert max(verification.loss_error, verification.gradient_error) <= 1e-9, str(verification)
    assert verification.parameter_error <= 1e-9, str(verification)
    return verification


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ({"data": 3}, {"compression": "bf16"}),
        ({"data": 2, "pipeline": 2}, {"compression": "fp16", "tied": True}),
        ({"data": 2, "tensor": 2}, {"compression": "bf16", "zero": 1}),
        ({"data": 3}, {"compression": "fp16", "zero": 2}),
        ({"data": 2}, {"compression": "bf16", "zero": 1, "precision": "bf16"}),
        ({"data": 2, "pipeline": 2}, {"compression": "bf16", "zero": 3, "schedule": "1f1b"}),
    ],
)
def test_gradients_in_16_bits_are_those_of_one_process_that_casts(
    mesh: dict[str, int], options: dict[str, Any], tmp_path: Path
) -> None:
    name = options["compression"]
    program = compiled(mesh, **options)
    words = [f'updates=DataUpdates(compression="{name}")', f"zero={options.get('zero', '')}"]
    verification = exact(program, tmp_path, *words[: 1 + ("zero" in options)])
    assert "compressed gradients are" in verification.note
    assert "0.0e+00 from whole" not in verification.note


class Hooked(nn.Module):
    """It has a hook that is not linear in how often it runs, and a complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.layer.weight.register_hook(lambda gradient: 3 * gradient)
        self.phase = nn.Parameter(torch.randn(8, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        loss: torch.Tensor = (torch.complex(y, y) * self.phase).abs().square().mean()
        return loss


@pytest.mark.parametrize("wrong", [1.0, 1.01])
def test_verify_repeats_compressed_sums_and_takes_no_wrong_ones(
    wrong: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    program = pc.compile(
        Hooked(), pc.Mesh(data=2), (torch.randn(2, 8),), microbatches=2, compression="bf16",
        progress=False,
    )  # fmt: skip
    monkeypatch.setattr(data_ranks, "summed", lambda *given: wrong * compression.summed(*given))
    verification = program.verify()
    assert verification.ok == (wrong == 1.0), str(verification)
    assert (verification.gradient_error > 1e-3) == (wrong != 1.0)


def test_whole_parameters_go_with_compressed_sums_of_every_micro_batch(tmp_path: Path) -> None:
    states = []
    for zero in (1, 3):
        program = compiled({"data": 2}, compression="bf16", zero=zero)
        batch = [random_batch(program.problem.graph, 4, seed=0)]
        path = str(program.export(tmp_path / str(zero)))
        job = Job(path, batch, optimizer="Adafactor", options={"lr": 1e-3})
        states.append(pool().run(job, 2).state)
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value, rtol=0, atol=3e-3)


def test_what_factors_leave_out_of_a_step_that_is_refused_is_not_kept() -> None:
    class Alone:
        """The channels of one rank."""

        def sum_in_order(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> None:
            pass

    torch.manual_seed(0)
    powersgd = PowerSGD(1, cast(Channels, Alone()))
    good, bad = torch.randn(8, 8), torch.full((8, 8), float("nan"))
    for gradient in (bad, good, bad):
        before = dict(powersgd.states())
        powersgd._sum({"w": gradient.clone()}, (0,))
        after = dict(powersgd.states())
        assert all(tensor.isfinite().all() for tensor in after.values())
        if gradient is bad and before:
            assert all(torch.equal(before[key], tensor) for key, tensor in after.items())
        elif gradient is good:
            assert after["error/w"].norm() > 0


def test_factors_take_two_more_tensors_like_the_gradient_at_most() -> None:
    class Alone:
        """The channels of one rank."""

        def sum_in_order(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> None:
            pass

    powersgd, gradient, tracker = PowerSGD(1, cast(Channels, Alone())), torch.ones(99, 99), None
    for _ in range(2):  # the first makes the errors, which stay
        tracker = MemTracker()
        tracker.track_external(gradient, *(tensor for _, tensor in powersgd.states()))
        with tracker:
            powersgd._sum({"w": gradient}, (0,))
    assert tracker is not None
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    assert peak < 4.2 * gradient.nbytes  # it, its error, and two more


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tied": True, "schedule": "1f1b"}, "'embedding.weight' is on several"),
        ({"schedule": "zb-h1"}, "take a schedule with whole backwards"),
    ],
)
def test_what_one_process_could_not_cast_alike_is_refused(
    options: dict[str, Any], words: str
) -> None:
    with pytest.raises(pc.InputError, match=words):
        compiled({"data": 2, "pipeline": 2}, compression="bf16", zero=2, **options)


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ({"data": 3, "pipeline": 2}, {"tied": True}),
        ({"data": 2, "tensor": 2}, {"outer": "average"}),
        ({"data": 2, "pipeline": 2}, {"vocabulary": "vocab-2"}),
        ({"data": 2}, {"outer": (0.5, 0.3), "every": 1, "precision": "bf16"}),
    ],
)
def test_local_steps_and_averages_are_those_of_one_process(
    mesh: dict[str, int], options: dict[str, Any], tmp_path: Path
) -> None:
    program = compiled(mesh, updates="local", **options)
    words = 'way="local"', "AVERAGE_PARAMETERS"
    exact(program, tmp_path, *words)
    kinds = [line.kind for line in program.instructions(0)]
    assert (Kind.REDUCE_GRADIENTS in kinds) == ("tied" in options)  # of the tied tensor alone


def test_an_average_that_is_left_out_is_found() -> None:
    lowered = compiled({"data": 2}, updates="local").lowered
    lists = tuple(lines[:-1] for lines in lowered.instructions)
    with pytest.raises(pc.PlanError, match="never gathers bucket_0"):
        verify(dataclasses.replace(lowered, instructions=lists))
    wrong = dataclasses.replace(lowered, updates=ALL_REDUCE)
    with pytest.raises(pc.PlanError, match="updates is"):
        verify(wrong)


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ({"data": 3, "pipeline": 2}, {"tied": True}),
        pytest.param({"data": 2, "tensor": 2}, {"precision": "bf16"}, marks=pytest.mark.sweep),
        ({"data": 2, "pipeline": 2}, {"vocabulary": "vocab-2"}),
    ],
)
def test_a_server_that_updates_for_all_has_the_numbers_of_one_process(
    mesh: dict[str, int], options: dict[str, Any], tmp_path: Path
) -> None:
    program = compiled(mesh, updates="parameter-server", **options)
    exact(program, tmp_path, 'way="parameter-server"', "GATHER_PARAMETERS")
    report = program.report()
    through, states = report.server
    assert "through its link in a step" in str(report)
    sizes = {rank.nbytes for rank in report.averaged}
    assert through == 2 * (program.lowered.data - 1) * max(sizes)
    assert states > 0


def test_a_server_is_slower_than_an_all_reduce_where_many_send_to_it() -> None:
    seconds = [
        compiled({"data": 8}, updates=way).simulate().step_time
        for way in ("all-reduce", "parameter-server")
    ]
    assert seconds[0] < seconds[1]


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ({"data": 3, "pipeline": 2}, {"tied": True}),
        ({"data": 2, "tensor": 2}, {"precision": "bf16"}),
        pytest.param(
            {"data": 2, "pipeline": 2}, {"vocabulary": "vocab-2"}, marks=pytest.mark.sweep
        ),
    ],
)
def test_factors_with_error_feedback_are_those_of_one_process(
    mesh: dict[str, int], options: dict[str, Any], tmp_path: Path
) -> None:
    program = compiled(mesh, compression="powersgd", compression_rank=2, **options)
    verification = exact(program, tmp_path, 'DataUpdates(compression="powersgd", rank=2)')
    assert "compressed gradients are" in verification.note
    whole = compiled(mesh, **options).report()
    for packed, rank in zip(program.report().averaged, whole.averaged, strict=True):
        assert packed.nbytes < rank.nbytes


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ({"data": 3, "pipeline": 2}, {"tied": True}),
        ({"data": 2, "tensor": 2}, {"staleness": 0, "precision": "bf16"}),
        ({"data": 2, "pipeline": 2}, {"vocabulary": "vocab-2", "staleness": 1}),
    ],
)
def test_steps_that_do_not_wait_are_those_of_one_process_in_their_order(
    mesh: dict[str, int], options: dict[str, Any], tmp_path: Path
) -> None:
    program = compiled(mesh, updates="asynchronous", **options)
    exact(program, tmp_path, 'way="asynchronous"', "PUSH_PULL")


def test_hooks_see_every_update_and_a_rank_that_stays_open_is_told_of() -> None:
    text = forked.run(2, stepping.ranks)
    assert "updates 6, with gradients 6, unchanged True" in text
    assert "neither step nor close their workers (steps by data rank: 0: 3, 1: 3)" in text


def test_no_thread_of_a_server_outlives_the_interpreter() -> None:
    assert "left:\n" in forked.run(2, stepping.unclosed)


def test_what_ways_mean_for_the_numbers_is_in_the_report() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"updates": "asynchronous", "staleness": 3}, "at most 3 steps ahead of the slowest"),
        ({"updates": "local", "every": 7}, "every 7 steps weights are averaged, as a step"),
        ({"compression": "powersgd"}, "factors of rank 4"),
    ]
    for options, words in cases:
        text = str(compiled({"data": 2}, **options).report())
        assert words in " ".join(text.split()), text


WAYS: tuple[dict[str, Any], ...] = (
    {"updates": "parameter-server"},
    {"updates": "local", "every": 2},
    {"updates": "asynchronous", "staleness": 1},
    {"compression": "bf16"},
    {"compression": "bf16", "zero": 2, "schedule": "1f1b"},
    {"compression": "fp16", "zero": 3, "schedule": "1f1b"},
    {"compression": "powersgd", "compression_rank": 2},
)


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["gpt-tied", "llama", "t5", "resnet", "moe", "gpt-dropout"])
@pytest.mark.parametrize("options", WAYS, ids=str)
def test_every_way_is_exact_on_every_mesh(name: str, options: dict[str, Any]) -> None:
    model, inputs = zoo.build(name)
    program = pc.compile(model, pc.Mesh(), inputs, microbatches=1, progress=False)
    for pipeline, tensor, data in ((1, 1, 2), (2, 1, 2), (1, 2, 2), (2, 1, 3)):
        mesh = pc.Mesh(pipeline=pipeline, tensor=tensor, data=data)
        try:
            found = pc.compile(program, mesh, microbatches=2, progress=False, **options)
        except pc.InputError as error:
            assert ("statistics" if name == "resnet" else "is on several") in str(error), error
            continue
        verification = found.verify()
        assert verification.ok, (mesh, str(verification))
