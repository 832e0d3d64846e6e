"""A worker in 16 bits keeps masters and scales its loss; gradients are clipped as torch does."""

import copy
import functools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim.swa_utils import get_ema_multi_avg_fn

import parcompiler as pc
from parcompiler.runtime.mixed_precision import LEAST
from parcompiler.runtime.updates import Updates
from tests import zoo
from tests.runtime.workers import CLASSES, Mixed, batch, compiled, mixed, one_process

MICROBATCHES = 3


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    yield
    left = dist.is_initialized()
    if left:
        dist.destroy_process_group()
    assert not left


@pytest.fixture(scope="module")
def half() -> pc.Program:
    return compiled(mixed(), precision="fp16")


@pytest.fixture(scope="module")
def single() -> pc.Program:
    return compiled(mixed())


def the_model(program: pc.Program) -> Mixed:
    assert isinstance(program.model, Mixed)
    return copy.deepcopy(program.model)


def test_parameters_are_copies_of_masters_and_batch_norms_stay_wide(half: pc.Program) -> None:
    model = the_model(half)
    with half.worker() as worker:
        worker.set_optimizer(torch.optim.AdamW, lr=1e-4)
        worker.train_step(batch(MICROBATCHES))
        own = {name: p.detach().clone() for name, p in worker.named_parameters()}
        state = worker.gather_state_dict()
    assert state is not None
    for name, tensor in own.items():
        wide = name.startswith("norm")
        assert tensor.dtype == (torch.float32 if wide else torch.float16), name
        assert torch.equal(state[name].to(tensor.dtype), tensor), name
        if half.captured.by_name[name].trainable:  # the loss depends on it
            assert state[name].dtype == torch.float32
    moved = (state["head.weight"] - model.head.weight.detach()).abs().max()
    assert 0 < float(moved) < 2e-4  # less than 16 bits could tell
    assert state["norm.running_mean"].dtype == torch.float32


def test_a_state_that_is_loaded_again_is_the_same_to_the_last_bit(half: pc.Program) -> None:
    wanted = {n: t + 1e-5 for n, t in the_model(half).state_dict().items() if "weight" in n}
    with half.worker() as worker:
        worker.load_state_dict(wanted, strict=False)
        state = worker.gather_state_dict()
    assert state is not None
    assert torch.equal(state["head.weight"], wanted["head.weight"])


def test_masters_take_what_is_written_into_parameters(half: pc.Program) -> None:
    with half.worker() as worker:
        worker.set_optimizer(torch.optim.SGD, lr=0.0)
        fine = {n: t + 1e-5 for n, t in the_model(half).state_dict().items() if "weight" in n}
        worker.load_state_dict(fine, strict=False)
        weight = dict(worker.named_parameters())["head.weight"]
        weight.data[0] = 0.3  # no version tells of it
        state = worker.gather_state_dict()
        worker.step(batch(MICROBATCHES))
        weight.data[1].clamp_(-0.01, 0.01)
        worker.optimizer_step()
        later = worker.gather_state_dict()
    assert state is not None and later is not None
    wanted = fine["head.weight"].clone()
    wanted[0] = torch.tensor(0.3).half()
    assert torch.equal(state["head.weight"], wanted)
    clamped = wanted[1].half().clamp(-0.01, 0.01)
    wanted[1] = torch.where(clamped == wanted[1].half(), wanted[1], clamped)
    assert torch.equal(later["head.weight"], wanted)
    assert torch.equal(later["first.weight"], fine["first.weight"])


def test_gradients_and_losses_are_told_without_the_scale(half: pc.Program) -> None:
    model, data = the_model(half), batch(MICROBATCHES)
    wanted = one_process(model, data, MICROBATCHES)
    with half.worker() as worker:
        loss = worker.step(data)
        gradients = worker.gather_gradients()
        assert worker.loss_scale == 2.0**16
    assert loss.dtype == torch.float32
    assert torch.allclose(loss, wanted, rtol=1e-2)
    assert gradients is not None
    assert model.head.weight.grad is not None
    limit = 2e-2 * float(model.head.weight.grad.abs().max())
    assert float((gradients["head.weight"] - model.head.weight.grad).abs().max()) <= limit


def test_steps_that_are_not_finite_at_any_scale_end_the_run(half: pc.Program) -> None:
    with half.worker() as worker:
        worker.set_optimizer(torch.optim.SGD, lr=0.1)
        with torch.no_grad():
            for _, parameter in worker.named_parameters():
                parameter.fill_(float("nan"))
        worker.loss_scale = 2 * LEAST
        worker.train_step(batch(MICROBATCHES))
        assert worker.loss_scale == LEAST
        with pytest.raises(pc.LaunchError, match=r"of 1 steps before it .* come below 6e-05"):
            worker.train_step(batch(MICROBATCHES))


def test_a_step_that_is_not_finite_is_skipped_and_the_scale_halved(half: pc.Program) -> None:
    with half.worker() as worker:
        worker.set_optimizer(torch.optim.AdamW, lr=0.1)
        worker.loss_scale = 2.0**40
        before = {n: p.detach().clone() for n, p in worker.named_parameters()}
        loss = worker.train_step(batch(MICROBATCHES))
        assert loss.isfinite()
        assert worker.skipped_steps == 1
        assert worker.loss_scale == 2.0**39
        assert all(torch.equal(p, before[n]) for n, p in worker.named_parameters())
        worker.loss_scale = 2.0**10
        worker.train_step(batch(MICROBATCHES))
        assert worker.skipped_steps == 1
        assert worker.gradient_norm is not None
        assert worker.gradient_norm.isfinite()
        assert not torch.equal(
            dict(worker.named_parameters())["head.weight"], before["head.weight"]
        )


@pytest.mark.parametrize("most", [0.01, 100.0])
def test_clipping_is_that_of_torch(single: pc.Program, most: float) -> None:
    model, data = the_model(single), batch(MICROBATCHES)
    one_process(model, data, MICROBATCHES)
    with single.worker() as worker:
        worker.step(data)
        assert worker.gradient_norm is None
        found = worker.clip_gradients(most)
        gradients = worker.gather_gradients()
        assert worker.gradient_norm is not None
        assert torch.equal(worker.gradient_norm, found)
    wanted = torch.nn.utils.clip_grad_norm_(model.parameters(), most)
    assert float(found) == pytest.approx(float(wanted), rel=1e-6)
    assert gradients is not None
    for name, gradient in gradients.items():
        exact = model.get_parameter(name).grad
        assert exact is not None
        assert torch.allclose(gradient, exact, rtol=1e-5, atol=1e-8), name


def test_gradients_in_16_bits_are_clipped_without_their_scale(half: pc.Program) -> None:
    data = batch(MICROBATCHES)
    with half.worker() as worker:
        worker.step(data)
        before = worker.clip_gradients(0.5)
        gradients = worker.gather_gradients()
    assert gradients is not None
    assert float(before) > 0.5
    norms = torch.stack([gradient.norm() for gradient in gradients.values()])
    assert float(norms.norm()) == pytest.approx(0.5, rel=1e-3)


def test_every_step_of_an_optimizer_with_a_norm_is_clipped(single: pc.Program) -> None:
    data = batch(MICROBATCHES)
    with single.worker() as worker:
        worker.set_optimizer(torch.optim.SGD, max_norm=0.01, lr=1.0)
        before = {n: p.detach().clone() for n, p in worker.named_parameters()}
        worker.train_step(data)
        moved = [(p.detach() - before[n]).norm() for n, p in worker.named_parameters()]
    assert float(torch.stack(moved).norm()) == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("most", [0.0, -1.0, float("nan"), "1", True])
def test_a_norm_that_is_none_is_refused(single: pc.Program, most: float) -> None:
    with single.worker() as worker:
        with pytest.raises(pc.InputError, match="max_norm must be a positive number"):
            worker.set_optimizer(torch.optim.SGD, max_norm=most, lr=1.0)
        worker.step(batch(MICROBATCHES))  # nothing is broken by it


def test_what_cannot_be_scaled_or_kept_is_refused(single: pc.Program, half: pc.Program) -> None:
    with single.worker() as worker:
        assert worker.loss_scale == 1.0
        with pytest.raises(pc.InputError, match="scaled in float16 alone"):
            worker.loss_scale = 2.0
    with half.worker() as worker:
        wrong: Any
        for wrong in (0.0, float("inf"), -1.0, "1"):
            with pytest.raises(pc.InputError, match="must be finite and positive"):
                worker.loss_scale = wrong


def test_an_asynchronous_program_has_neither_masters_nor_a_norm() -> None:
    with pytest.raises(pc.InputError, match=r"keeps no masters.*precision='bf16'"):
        compiled(mixed(), precision="bf16", schedule="pipedream")
    with compiled(mixed(), schedule="pipedream").worker() as worker:
        with pytest.raises(pc.InputError, match="no common norm"):
            worker.set_optimizer(torch.optim.SGD, max_norm=1.0, lr=0.1)


def test_inputs_in_float32_are_cast_for_a_16_bit_program_alone(
    single: pc.Program, half: pc.Program
) -> None:
    data = batch(MICROBATCHES)
    narrow = {**data, "x": data["x"].half()}
    with half.worker() as worker:
        assert torch.equal(worker.evaluate(data), worker.evaluate(narrow))
    with single.worker() as worker, pytest.raises(pc.InputError, match=r"must have dtype"):
        worker.evaluate(narrow)


@pytest.mark.parametrize("reads", [False, True])
def test_what_is_written_into_masters_counts_at_once(half: pc.Program, reads: bool) -> None:
    data = batch(MICROBATCHES)
    with half.worker() as worker:
        optimizer = worker.set_optimizer(torch.optim.SGD, lr=0.0)
        worker.loss_scale = 2.0**10
        worker.train_step(data)
        if reads:
            assert dict(worker.named_parameters())
        with torch.no_grad():
            for weight in optimizer.param_groups[0]["params"]:
                weight.zero_()
        assert worker.evaluate(data).item() == pytest.approx(math.log(CLASSES))
        worker.train_step(data)
        state = worker.gather_state_dict()
        assert state is not None
        trained = {name for name, p in worker.named_parameters() if p.requires_grad}
        assert not any(state[name].any() for name in trained)


def test_a_scale_that_one_rank_alone_has_is_refused(
    half: pc.Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = torch.tensor([0.0, 2.0**16, 1.0], dtype=torch.float64)  # of a second rank
    with half.worker() as worker:
        monkeypatch.setattr(worker._updates, "_total", lambda sums: sums.add_(other))
        worker.set_optimizer(torch.optim.SGD, lr=0.1)
        worker.train_step(batch(MICROBATCHES))
        worker.loss_scale = 2.0**10
        with pytest.raises(pc.InputError, match="set it on all ranks alike"):
            worker.train_step(batch(MICROBATCHES))


def test_groups_of_a_16_bit_program_are_of_masters(half: pc.Program) -> None:
    with half.worker() as worker:
        groups = [("*.bias", {"lr": 0.0, "weight_decay": 0.0}), ("head.*", {"lr": 0.5})]
        optimizer = worker.set_optimizer(torch.optim.AdamW, lr=1e-3, groups=groups)
        before = worker.gather_state_dict()
        worker.loss_scale = 2.0**10
        worker.train_step(batch(MICROBATCHES))
        after = worker.gather_state_dict()
    assert before is not None
    assert after is not None
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 0.0, 0.5]
    assert all(p.dtype == torch.float32 for g in optimizer.param_groups for p in g["params"])
    moved = {n: float((after[n] - before[n]).abs().max()) for n in before}
    assert moved["first.bias"] == moved["norm.bias"] == 0.0
    assert 0 < moved["first.weight"] < 2e-3
    assert moved["head.weight"] > 0.4  # the last pattern that matches decides, for its bias too
    assert moved["head.bias"] > 0.4


def test_a_function_of_name_and_parameter_makes_groups(half: pc.Program) -> None:
    def decayed(name: str, parameter: torch.nn.Parameter) -> dict[str, float]:
        return {"weight_decay": 0.1} if parameter.dim() >= 2 else {}

    with half.worker() as worker:
        kind = functools.partial(torch.optim.AdamW, betas=(0.9, 0.95), weight_decay=0.0)
        optimizer = worker.set_optimizer(kind, lr=1e-3, groups=decayed)
    first, second = optimizer.param_groups
    assert (first["weight_decay"], second["weight_decay"]) == (0.0, 0.1)
    assert first["betas"] == (0.9, 0.95)
    assert {p.dim() for p in first["params"]} == {1}
    assert {p.dim() for p in second["params"]} == {2}


@pytest.mark.parametrize(
    ("groups", "text"),
    [
        ([("*.bais", {})], r"no trained parameter matches '\*\.bais' of the groups"),
        ([("frozen.*", {"lr": 1.0})], "no trained parameter matches"),
        (["*.bias"], "a group is a pattern of names and options"),
        ([("*.bias", {"params": []})], "a group is a pattern of names and options"),
        (lambda name, parameter: 1, "a function of groups returns options such as"),
    ],
)
def test_groups_of_another_form_are_refused(half: pc.Program, groups: Any, text: str) -> None:
    with half.worker() as worker:
        with pytest.raises(pc.InputError, match=text):
            worker.set_optimizer(torch.optim.SGD, lr=1.0, groups=groups)
        worker.set_optimizer(torch.optim.SGD, lr=1.0)  # nothing is broken by it


def test_an_optimizer_that_is_made_already_is_refused(half: pc.Program) -> None:
    made: Any = torch.optim.AdamW([torch.zeros(1)], lr=1e-3)
    with half.worker() as worker:
        with pytest.raises(pc.InputError, match=r"give the class.*an instance of AdamW"):
            worker.set_optimizer(made)
        with pytest.raises(pc.InputError, match="SparseAdam steps tables alone"):
            worker.set_optimizer(torch.optim.SparseAdam, lr=0.1)
        with pytest.raises(pc.InputError, match="LBFGS runs the model several times"):
            worker.set_optimizer(torch.optim.LBFGS, lr=0.1)
        with pytest.raises(pc.InputError, match="an optimizer's class is needed"):
            worker.set_optimizer(None)  # type: ignore[arg-type]
        with pytest.raises(pc.InputError, match=r"an optimizer is needed.*makes 0"):
            worker.set_optimizer(lambda *_, **options: 0)  # type: ignore[arg-type]


class Together(torch.optim.SGD):
    """Divides by the norm of all gradients that it is given."""

    def step(self, closure: Any = None) -> Any:
        gradients = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        size = sum(gradient.square().sum() for gradient in gradients) ** 0.5
        for gradient in gradients:
            gradient /= size
        return super().step(closure)


class Alone(torch.optim.SGD):
    """Divides each gradient by its own norm."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad /= parameter.grad.norm()
        return super().step(closure)


def test_an_optimizer_that_looks_at_all_parameters_needs_them_on_every_rank(
    single: pc.Program,
) -> None:
    rank = compiled(mixed(), mesh=pc.Mesh(pipeline=2)).rank_program(0)
    parameters = {"first.weight": torch.nn.Parameter(torch.zeros(2, 2))}
    updates = Updates(rank, parameters, torch.device("cpu"), lambda _: None)
    updates.set_optimizer(Alone, None, {"lr": 0.1})
    with pytest.raises(pc.InputError, match="Together computes something over all of its param"):
        updates.set_optimizer(Together, None, {"lr": 0.1})
    with single.worker() as worker:
        worker.set_optimizer(Together, lr=0.1)


def test_an_optimizer_of_matrices_is_made_where_a_rank_trains_nothing() -> None:
    rank = compiled(mixed(), mesh=pc.Mesh(pipeline=2)).rank_program(0)
    updates = Updates(rank, {}, torch.device("cpu"), lambda _: None)
    updates.set_optimizer(torch.optim.Muon, None, {"lr": 0.1})


def test_an_average_of_the_weights_is_a_state_of_the_optimizer(half: pc.Program) -> None:
    average = get_ema_multi_avg_fn(0.5)

    def follow(optimizer: torch.optim.Optimizer, *_: object) -> None:
        weights = [p.detach() for group in optimizer.param_groups for p in group["params"]]
        states = [optimizer.state[p] for group in optimizer.param_groups for p in group["params"]]
        for state, weight in zip(states, weights, strict=True):
            state.setdefault("average", weight.clone())
        average([state["average"] for state in states], weights, 1)

    with half.worker() as worker:
        worker.loss_scale = 2.0**10
        start = worker.gather_state_dict()
        optimizer = worker.set_optimizer(torch.optim.SGD, lr=0.1)
        optimizer.register_step_post_hook(follow)
        wanted, states = None, []
        for seed in range(3):
            worker.train_step(batch(MICROBATCHES, seed))
            state = worker.gather_state_dict()
            assert state is not None
            states.append(state["head.weight"])
            wanted = states[0] if wanted is None else (wanted + states[-1]) / 2
        with worker.using("average"):
            averaged = worker.gather_state_dict()
            own = dict(worker.named_parameters())["head.weight"].detach().clone()
        again = worker.gather_state_dict()
        with pytest.raises(pc.InputError, match="no state 'ema'"), worker.using("ema"):
            pass
    assert start is not None
    assert averaged is not None
    assert again is not None
    assert wanted is not None
    assert torch.allclose(averaged["head.weight"], wanted, rtol=1e-6)
    assert not torch.equal(averaged["head.weight"], states[-1])
    assert torch.equal(own, averaged["head.weight"].half())
    assert torch.equal(again["head.weight"], states[-1])


@pytest.mark.parametrize(
    "options",
    [
        {"mesh": pc.Mesh(tensor=2), "sharding": {"head.weight": "S(0)"}},
        {"mesh": pc.Mesh(pipeline=2), "vocabulary": "vocab-2"},
    ],
)
def test_an_optimizer_of_whole_matrices_gets_no_pieces(options: dict[str, Any]) -> None:
    model, inputs = zoo.build("llama")
    program = pc.compile(model, inputs=inputs, microbatches=2, **options)
    rank = program.rank_program(0)
    pieces = [*rank.shards, *rank.rows]
    assert pieces
    parameters = {name: torch.nn.Parameter(torch.zeros(2, 2)) for name in pieces}
    updates = Updates(rank, parameters, torch.device("cpu"), lambda _: None)
    named = f"Adafactor is not known to work .* pieces of {len(pieces)} parameters"
    with pytest.raises(pc.InputError, match=named):
        updates.set_optimizer(torch.optim.Adafactor, None, {})
    updates.set_optimizer(torch.optim.Adafactor, None, {}, elementwise=True)
    updates.set_optimizer(torch.optim.Adam, None, {})


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_a_fused_step_reads_gradients_that_lie_otherwise(
    single: pc.Program, kind: type[torch.optim.Optimizer]
) -> None:
    states = []
    for fused in (False, True):
        with single.worker() as worker:
            optimizer = worker.set_optimizer(kind, lr=0.1, fused=fused)
            worker.step(batch(MICROBATCHES))
            matrices = [p for _, p in worker.named_parameters() if p.dim() == 2]
            turned = [p for p in matrices if p.grad is not None]
            for parameter in turned:
                assert parameter.grad is not None
                parameter.grad = parameter.grad.t().contiguous().t()
                assert parameter.grad.stride() != parameter.stride()
            assert turned
            optimizer.step()
            states.append(worker.gather_state_dict())
    loop, fused_step = states
    assert loop is not None
    assert fused_step is not None
    for name, tensor in loop.items():
        assert torch.allclose(fused_step[name], tensor, rtol=1e-6, atol=1e-7), name
