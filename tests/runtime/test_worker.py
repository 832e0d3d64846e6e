"""A worker on one rank is the model: step, train, evaluate, state, and its end."""

import copy
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import parcompiler as pc
from parcompiler.instruction import Kind
from parcompiler.runtime import Stage, run
from parcompiler.runtime.worker import BACKSTOP
from tests.runtime.workers import Mixed, batch, compiled, mixed, one_process

MICROBATCHES = 3


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    yield
    left = dist.is_initialized()
    if left:
        dist.destroy_process_group()
    assert not left


@pytest.fixture(scope="module")
def program() -> pc.Program:
    return compiled(mixed())


@pytest.fixture(scope="module")
def random_program() -> pc.Program:
    return compiled(mixed(dropout=0.5))


def the_model(program: pc.Program) -> Mixed:
    """A copy of the model that a program was compiled from."""
    assert isinstance(program.model, Mixed)
    return copy.deepcopy(program.model)


class Scaled(Mixed):
    """Makes floats of integers, and of nothing."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scale = (labels * 0.1 + torch.zeros(len(labels)).cos())[:, None]
        return super().forward(x * scale, labels)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_dtype_of_the_process_changes_nothing(dtype: torch.dtype) -> None:
    data = batch(MICROBATCHES)
    with compiled(Scaled()).worker() as worker:
        wanted = worker.evaluate(data)
        torch.set_default_dtype(dtype)
        try:
            found = worker.evaluate(data)
            assert torch.get_default_dtype() == dtype
        finally:
            torch.set_default_dtype(torch.float32)
    assert torch.equal(found, wanted)


def test_a_step_has_the_loss_and_gradients_of_one_process(program: pc.Program) -> None:
    model, data = the_model(program), batch(MICROBATCHES)
    wanted = one_process(model, data, MICROBATCHES)
    with program.worker() as worker:
        loss = worker.step(data)
        gradients = worker.gather_gradients()
    assert loss.shape == ()
    assert torch.equal(loss, wanted)
    assert gradients is not None
    named = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert gradients.keys() == named.keys()
    for name, gradient in named.items():
        assert torch.allclose(gradients[name], gradient, rtol=1e-5, atol=1e-7), name


def test_a_step_leaves_parameters_and_drops_old_gradients(program: pc.Program) -> None:
    with program.worker() as worker:
        before = {n: p.detach().clone() for n, p in worker.named_parameters()}
        worker.step(batch(MICROBATCHES))
        first = worker.gather_gradients()
        worker.step(batch(MICROBATCHES))
        second = worker.gather_gradients()
        assert all(torch.equal(p, before[n]) for n, p in worker.named_parameters())
    assert first is not None
    assert second is not None
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_unused_and_frozen_parameters_have_no_gradient(program: pc.Program) -> None:
    with program.worker() as worker:
        worker.step(batch(MICROBATCHES))
        found = dict(worker.named_parameters())
        assert not found["frozen.weight"].requires_grad
        assert found["frozen.weight"].grad is None
        assert all(p.grad is None for n, p in found.items() if n.startswith("unused"))
        assert found["first.weight"].grad is not None
        gradients = worker.gather_gradients()
    assert gradients is not None
    assert not [name for name in gradients if name.startswith(("frozen", "unused"))]


def test_training_follows_one_process(program: pc.Program) -> None:
    model = the_model(program)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.01)
    with program.worker() as worker:
        worker.set_optimizer(torch.optim.AdamW, lr=0.01)
        for seed in range(4):
            data = batch(MICROBATCHES, seed)
            wanted = one_process(model, data, MICROBATCHES)
            optimizer.step()
            optimizer.zero_grad()
            assert torch.allclose(worker.train_step(data), wanted, rtol=1e-6)
        assert all(p.grad is None for _, p in worker.named_parameters())
        state = worker.gather_state_dict()
    assert state is not None
    assert state.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.allclose(state[name], tensor, rtol=1e-4, atol=1e-6), name


def test_the_learning_rate_can_be_scheduled(program: pc.Program) -> None:
    with program.worker() as worker:
        optimizer = worker.set_optimizer(torch.optim.SGD, lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.0)
        worker.train_step(batch(MICROBATCHES))
        scheduler.step()
        before = {n: p.detach().clone() for n, p in worker.named_parameters()}
        worker.train_step(batch(MICROBATCHES))
        assert all(torch.equal(p, before[n]) for n, p in worker.named_parameters())


def test_an_optimizer_is_needed_to_train(program: pc.Program) -> None:
    with program.worker() as worker:
        with pytest.raises(pc.InputError, match=r"call worker\.set_optimizer.* before train_step"):
            worker.train_step(batch(MICROBATCHES))
        with pytest.raises(pc.InputError, match=r"call worker\.set_optimizer"):
            worker.optimizer_step()
        worker.step(batch(MICROBATCHES))  # nothing is broken by it


def test_an_evaluation_is_that_of_the_model_in_evaluation_mode(random_program: pc.Program) -> None:
    model, data = the_model(random_program), batch(MICROBATCHES)
    for seed in range(2):
        one_process(model, batch(MICROBATCHES, seed), MICROBATCHES)
    with random_program.worker() as worker:
        worker.load_state_dict(model.state_dict())
        found = worker.evaluate(data)
        again = worker.evaluate(data)
    model.eval()
    with torch.no_grad():
        losses = [
            model(**{k: t[2 * i : 2 * i + 2] for k, t in data.items()}) for i in range(MICROBATCHES)
        ]
    assert torch.equal(found, torch.stack(losses).mean())
    assert torch.equal(again, found)
    assert not found.requires_grad


def test_an_evaluation_changes_nothing(random_program: pc.Program) -> None:
    data = batch(MICROBATCHES)
    with random_program.worker() as worker:
        worker.step(data)
        before = worker.gather_state_dict()
        gradients = worker.gather_gradients()
        worker.evaluate(data)
        after = worker.gather_state_dict()
        kept = worker.gather_gradients()
        assert all(stage.training for stage in worker.stages.values())
    assert before is not None
    assert after is not None
    assert before["norm.num_batches_tracked"] == MICROBATCHES
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert gradients is not None
    assert kept is not None
    assert all(torch.equal(gradients[name], kept[name]) for name in gradients)


def test_training_goes_on_after_an_evaluation_as_without_it(random_program: pc.Program) -> None:
    def losses(evaluating: bool) -> list[float]:
        torch.manual_seed(5)
        with random_program.worker() as worker:
            worker.set_optimizer(torch.optim.SGD, lr=0.1)
            found = []
            for seed in range(3):
                found.append(worker.train_step(batch(MICROBATCHES, seed)).item())
                if evaluating:
                    worker.evaluate(batch(MICROBATCHES))
            return found

    assert losses(evaluating=True) == losses(evaluating=False)


def test_steps_draw_different_random_numbers_and_the_same_from_the_same_seed(
    random_program: pc.Program,
) -> None:
    def losses(seed: int) -> list[float]:
        torch.manual_seed(seed)
        with random_program.worker() as worker:
            return [worker.step(batch(MICROBATCHES)).item() for _ in range(3)]

    assert len(set(losses(1))) == 3
    assert losses(1) == losses(1)
    assert losses(1) != losses(2)


def test_random_numbers_do_not_depend_on_the_schedule() -> None:
    program = compiled(mixed(dropout=0.5), schedule="gpipe")
    other = pc.compile(program, pc.Mesh(), microbatches=MICROBATCHES, schedule="naive")
    found = []
    for item in (program, other):
        torch.manual_seed(3)
        with item.worker() as worker:
            found.append(worker.step(batch(MICROBATCHES)))
    assert torch.equal(*found)


def test_the_users_generator_is_left_alone_by_steps(random_program: pc.Program) -> None:
    with random_program.worker() as worker:
        before = torch.get_rng_state()
        worker.step(batch(MICROBATCHES))
        worker.evaluate(batch(MICROBATCHES))
        assert torch.equal(torch.get_rng_state(), before)


def test_a_state_dict_goes_out_and_in(program: pc.Program) -> None:
    model = the_model(program)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.add_(1)
    with program.worker() as worker:
        worker.load_state_dict(model.state_dict())
        state = worker.gather_state_dict()
    assert state is not None
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(state[n], t) for n, t in model.state_dict().items())
    assert torch.equal(state["twin.weight"], state["first.weight"])


class Rotating(nn.Module):
    """Buffers that are in no state dict, beside one that is."""

    table: torch.Tensor
    steps: torch.Tensor
    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 5)
        self.register_buffer("table", torch.arange(6.0), persistent=False)
        self.register_buffer("steps", torch.zeros(()), persistent=False)
        self.register_buffer("scale", torch.ones(6))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.steps.add_(1)
        y = self.linear(x * self.table.cos() * self.scale) * torch.tensor(2.0)
        return nn.functional.cross_entropy(y, labels)


class Weighted(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * self.weight


def test_what_is_gathered_is_the_state_dict_of_the_model() -> None:
    model = Rotating()
    with compiled(model, loss=Weighted()).worker() as worker:
        state, everything = worker.gather_state_dict(), worker.gather_state_dict(everything=True)
        worker.load_state_dict(model.state_dict())
        assert worker.load_state_dict({"table": torch.ones(6)}, strict=False).unexpected_keys == []
        again = worker.gather_state_dict(everything=True)
    assert state is not None
    assert model.load_state_dict(state).missing_keys == []
    assert everything is not None
    assert everything.keys() - state.keys() >= {"table", "steps", "loss.weight"}
    assert again is not None
    assert again["table"].eq(1).all()


def test_names_that_do_not_match_are_refused_and_change_nothing(program: pc.Program) -> None:
    state = the_model(program).state_dict()
    wrong = {n: t + 1 for n, t in state.items() if n != "head.bias"} | {"tail.bias": torch.ones(5)}
    with program.worker() as worker:
        with pytest.raises(pc.InputError, match=r"lacks 'head.bias' \(1\)\n.*unknown 'tail.bias'"):
            worker.load_state_dict(wrong)
        found = worker.gather_state_dict()
        assert found is not None
        assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
        keys = worker.load_state_dict(wrong, strict=False)
        found = worker.gather_state_dict()
    assert (keys.missing_keys, keys.unexpected_keys) == (["head.bias"], ["tail.bias"])
    assert found is not None
    assert torch.equal(found["head.weight"], wrong["head.weight"])


def test_a_tied_tensor_may_be_given_under_any_of_its_names(program: pc.Program) -> None:
    state = the_model(program).state_dict()
    del state["first.weight"]
    with program.worker() as worker:
        assert worker.load_state_dict(state) == ([], [])
        with pytest.raises(pc.InputError, match=r"'head.bias' is no tensor"):
            worker.load_state_dict({**state, "head.bias": 3})  # type: ignore[dict-item]
        with pytest.raises(pc.InputError, match=r"names and tensors \(list given\)"):
            worker.load_state_dict([])  # type: ignore[arg-type]
        worker.step(batch(MICROBATCHES))


def test_a_buffer_without_value_is_named_with_what_to_do() -> None:
    with torch.device("meta"):
        model = Rotating()
    program = compiled(model)
    with program.worker() as worker:
        worker.load_state_dict(Rotating().state_dict())
        with pytest.raises(pc.InputError, match=r"lacks the value of 'steps' .*load_state_dict\("):
            worker.step(batch(MICROBATCHES))


def test_weights_of_another_shape_are_refused(program: pc.Program) -> None:
    with program.worker() as worker:
        with pytest.raises(pc.InputError, match=r"'head.bias' has another shape \(\(5,\) needed, "):
            worker.load_state_dict({"head.bias": torch.zeros(4)})
        worker.step(batch(MICROBATCHES))


def test_what_a_worker_gathers_is_a_copy(program: pc.Program) -> None:
    with program.worker() as worker:
        worker.step(batch(MICROBATCHES))
        first = worker.gather_state_dict()
        assert first is not None
        for tensor in first.values():
            tensor.zero_()
        second = worker.gather_state_dict()
    assert second is not None
    assert second["head.weight"].abs().sum() > 0
    assert the_model(program).head.weight.abs().sum() > 0


def test_training_a_worker_leaves_the_model_alone(program: pc.Program) -> None:
    before = the_model(program).state_dict()
    with program.worker() as worker:
        worker.set_optimizer(torch.optim.SGD, lr=1.0)
        worker.train_step(batch(MICROBATCHES))
    assert program.model is not None
    assert all(torch.equal(t, before[n]) for n, t in program.model.state_dict().items())


def test_a_trace_covers_the_last_step_once_it_is_recorded(program: pc.Program) -> None:
    with program.worker() as worker:
        worker.step(batch(MICROBATCHES))
        with pytest.raises(pc.InputError, match=r"call worker\.record\(\) before the step"):
            worker.trace()
        worker.record()
        for _ in range(2):
            worker.step(batch(MICROBATCHES))
        trace = worker.trace()
        worker.record(False)
        with pytest.raises(pc.InputError, match="no step is recorded"):
            worker.trace()
    assert tuple(record.instruction for record in trace) == tuple(program.instructions(0))
    assert all(0 <= record.begin <= record.end for record in trace)
    assert all(a.end <= b.begin for a, b in pairwise(trace))


def test_missing_weights_are_named_before_anything_is_computed(tmp_path: Path) -> None:
    program = compiled(mixed())
    folder = program.export(tmp_path / "out", weights=False)
    with pc.load(folder).worker() as worker:
        expected = r"lacks the weights of '.*' \(\d+ tensors\), .*--pretrained.*, or export with"
        with pytest.raises(pc.InputError, match=expected):
            worker.step(batch(MICROBATCHES))
    with pc.load(folder).worker() as worker:
        worker.load_state_dict(the_model(program).state_dict())
        worker.step(batch(MICROBATCHES))


def test_a_meta_model_has_no_weights_until_they_are_loaded() -> None:
    with torch.device("meta"):
        model = Mixed()
    with compiled(model).worker() as worker:
        with pytest.raises(pc.InputError, match="lacks the weights of"):
            worker.evaluate(batch(MICROBATCHES))
    with compiled(model).worker() as worker:
        worker.load_state_dict(mixed().state_dict())
        assert worker.step(batch(MICROBATCHES)).isfinite()


def test_a_with_statement_closes_and_closing_twice_is_harmless(program: pc.Program) -> None:
    with program.worker() as worker:
        assert dist.is_initialized()
    assert not dist.is_initialized()
    worker.close()
    worker.close()


def test_a_closed_worker_says_so(program: pc.Program) -> None:
    worker = program.worker()
    worker.set_optimizer(torch.optim.SGD, lr=0.1)
    worker.close()
    data = batch(MICROBATCHES)
    for use in (
        lambda: worker.step(data),
        lambda: worker.train_step(data),
        lambda: worker.evaluate(data),
        worker.gather_state_dict,
        worker.gather_gradients,
    ):
        with pytest.raises(pc.LaunchError, match=r"closed, because worker\.close\(\) was called"):
            use()
    assert dict(worker.named_parameters())  # what it holds can still be read


def test_closing_an_old_worker_leaves_a_new_one_alone(program: pc.Program) -> None:
    old = program.worker()
    old.close()
    with program.worker() as worker:
        old.close()
        worker.step(batch(MICROBATCHES))


def test_one_worker_follows_another(program: pc.Program) -> None:
    found = []
    for _ in range(3):
        with program.worker() as worker:
            found.append(worker.step(batch(MICROBATCHES)))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_after_a_failed_step_the_worker_says_that_it_is_closed_and_why(
    program: pc.Program,
) -> None:
    data = batch(MICROBATCHES)
    data["labels"][:2] = 99
    with program.worker() as worker:
        with pytest.raises(pc.LaunchError, match="rank 0 failed at 'FORWARD stage 0 mb 0'"):
            worker.step(data)
        with pytest.raises(pc.LaunchError, match="closed, because it failed: rank 0 failed at 'F"):
            worker.step(batch(MICROBATCHES))


def test_modes_in_which_other_numbers_come_out_are_refused(program: pc.Program) -> None:
    with program.worker() as worker:
        worker.set_optimizer(torch.optim.SGD, lr=0.1)
        with torch.inference_mode(), pytest.raises(pc.InputError, match="nothing is trained"):
            worker.train_step(batch(3))
        with torch.autocast("cpu"):
            for call in (worker.step, worker.train_step, worker.evaluate):
                with pytest.raises(pc.InputError, match=r"outside of torch\.autocast"):
                    call(batch(3))
        with torch.no_grad():
            first, second = (worker.train_step(batch(3)) for _ in range(2))
        with torch.inference_mode():
            assert worker.evaluate(batch(3)) != second < first


def test_a_refused_batch_leaves_the_worker_and_its_gradients_as_they_were(
    program: pc.Program,
) -> None:
    data = batch(MICROBATCHES)
    smaller = {key: tensor[:-1] for key, tensor in data.items()}
    with program.worker() as worker:
        loss = worker.step(data)
        before = worker.gather_gradients()
        for use in (worker.step, worker.evaluate):
            with pytest.raises(pc.InputError, match=r"5 rows .*; DataLoader\(drop_last=True\) le"):
                use(smaller)
            with pytest.raises(pc.InputError, match="the batch lacks 'labels'"):
                use({"x": data["x"]})
        after = worker.gather_gradients()
        assert torch.equal(worker.step(data), loss)
    assert before is not None
    assert after is not None
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("number", [1, 2])
def test_an_evaluation_takes_fewer_micro_batches(program: pc.Program, number: int) -> None:
    model, data = the_model(program).eval(), batch(number)
    parts = [{k: t[2 * i : 2 * i + 2] for k, t in data.items()} for i in range(number)]
    with program.worker() as worker:
        found = worker.evaluate(data)
        with pytest.raises(pc.InputError, match=rf"must have shape \(6, .*{2 * number}"):
            worker.step(data)
        assert worker.evaluate(batch(MICROBATCHES)).isfinite()
        with pytest.raises(pc.InputError, match=r"must have shape \(6, "):
            worker.evaluate(batch(MICROBATCHES + 1))
        with pytest.raises(pc.InputError, match=r"must have shape \(6, "):
            worker.evaluate(batch(0))
        with pytest.raises(pc.InputError, match=r"'labels'.*must have shape"):
            worker.evaluate({"x": data["x"], "labels": batch(MICROBATCHES)["labels"]})
    with torch.no_grad():
        assert torch.equal(found, torch.stack([model(**part) for part in parts]).mean())


def test_a_step_that_is_not_finite_is_an_error_on_request(program: pc.Program) -> None:
    data = batch(MICROBATCHES)
    infinite = {**data, "x": data["x"] / 0.0}
    with program.worker() as worker:
        worker.set_optimizer(torch.optim.SGD, lr=0.1)
        worker.train_step(data)
        assert worker.gradient_norm is None
        worker.set_optimizer(torch.optim.SGD, lr=0.1, error_if_nonfinite=True)
        worker.train_step(data)
        assert worker.gradient_norm is not None
        before = {name: p.detach().clone() for name, p in worker.named_parameters()}
        with pytest.raises(pc.LaunchError, match=r"loss of step 3 is not finite \(nan\): the par"):
            worker.train_step(infinite)
        worker.step(data)
        gradient = dict(worker.named_parameters())["head.weight"].grad
        assert gradient is not None
        gradient.fill_(torch.inf)
        with pytest.raises(pc.LaunchError, match=r"gradients of step 4 are not finite \(norm: inf"):
            worker.optimizer_step()
        assert all(torch.equal(p, before[name]) for name, p in worker.named_parameters())
        worker.train_step(data)  # nothing is broken by it
        worker.set_optimizer(torch.optim.SGD, lr=0.1)
        assert worker.train_step(infinite).isnan()


def test_gradients_that_are_not_finite_are_skipped_in_float16_and_losses_are_not() -> None:
    program, data = compiled(mixed(), MICROBATCHES, precision="fp16"), batch(MICROBATCHES)
    with program.worker() as worker:
        worker.set_optimizer(torch.optim.SGD, lr=0.1, error_if_nonfinite=True)
        worker.loss_scale = 2.0**40
        assert worker.train_step(data).isfinite()
        assert worker.skipped_steps == 1
        with pytest.raises(pc.LaunchError, match="the loss of step 2 is not finite"):
            worker.train_step({**data, "x": data["x"] / 0.0})


@pytest.mark.parametrize("variable", ["RANK", "WORLD_SIZE", "MASTER_PORT"])
def test_an_environment_that_is_none_of_torchrun_is_named(
    program: pc.Program, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    good = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in {**good, variable: "x"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(pc.LaunchError, match=r"'x'.*: start this program with torchrun"):
        program.worker()


def test_a_failure_in_the_model_names_rank_instruction_and_module(program: pc.Program) -> None:
    data = batch(MICROBATCHES)
    data["labels"][:2] = 99
    with program.worker() as worker:
        with pytest.raises(pc.LaunchError, match="rank 0 failed at 'FORWARD stage 0 mb 0' in modu"):
            worker.step(data)
    assert not dist.is_initialized()


def test_an_interruption_passes_through_and_closes(program: pc.Program) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with program.worker() as worker:
        worker.stages[0].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            worker.step(batch(MICROBATCHES))
        with pytest.raises(pc.LaunchError, match="interrupted by KeyboardInterrupt"):
            worker.step(batch(MICROBATCHES))
    assert not dist.is_initialized()


def test_the_callers_process_group_survives(program: pc.Program) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for _ in range(2):
            with program.worker() as worker:
                worker.step(batch(MICROBATCHES))
            assert dist.is_initialized()
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        assert torch.equal(tensor, torch.ones(2))
        with program.worker() as worker, pytest.raises(pc.InputError):
            worker.step({})
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_a_worker_that_cannot_start_leaves_nothing_behind(program: pc.Program) -> None:
    def broken() -> None:
        raise ZeroDivisionError

    rank = program.rank_program(0)
    with pytest.raises(pc.LaunchError, match="ZeroDivisionError"):
        pc.Worker(rank, {0: broken})  # type: ignore[dict-item]
    assert not dist.is_initialized()
    classes = _classes(program)
    with pytest.raises(pc.InputError, match="another shape"):
        pc.Worker(rank, classes, [("head.bias", torch.zeros(4))])
    assert not dist.is_initialized()


def _classes(program: pc.Program) -> dict[int, Callable[[], Stage]]:
    with program.worker() as worker:
        return {j: type(stage) for j, stage in worker.stages.items()}


def test_a_program_of_two_ranks_does_not_start_on_one(monkeypatch: pytest.MonkeyPatch) -> None:
    program = compiled(mixed(), mesh=pc.Mesh(pipeline=2))
    with pytest.raises(pc.LaunchError, match=r"needs 2 processes \(1 started\).*nproc-per-node 2"):
        program.worker()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(pc.LaunchError, match=r"needs 2 processes \(3 started\)"):
        program.worker()
    with pytest.raises(pc.LaunchError, match=r"needs 2 processes \(3 started\)"):
        pc.Worker(program.rank_program(0), {})
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        pc.LaunchError, match="this process is rank 0, and runs the script of rank 1"
    ):
        pc.Worker(program.rank_program(1), {})
    monkeypatch.delenv("RANK")
    with pytest.raises(pc.LaunchError, match="start this program with torchrun"):
        pc.Worker(program.rank_program(0), {})
    assert "RANK" not in os.environ


@pytest.mark.parametrize("timeout", [0, -1.0, 1e12, float("nan"), timedelta(), "5"])
def test_a_timeout_that_is_none_is_refused(timeout: Any, program: pc.Program) -> None:
    with pytest.raises(pc.InputError, match="timeout must be above 0 and at most 100000000 s"):
        program.worker(timeout=timeout)
    assert not dist.is_initialized()


def test_a_timeout_reaches_the_watch_and_later_the_process_groups(
    program: pc.Program, tmp_path: Path
) -> None:
    folder = program.export(tmp_path / "out")
    made: list[pc.Worker] = []

    def exported(timeout: timedelta | float) -> pc.Worker:
        made.append(pc.load(folder).worker(timeout=timeout))
        return made[-1]

    run(exported, ["--timeout", "7", "--steps", "1"])
    for timeout in (7, timedelta(seconds=7)):
        with program.worker(timeout=timeout) as worker:
            made.append(worker)
    assert {worker._watch._timeout for worker in made} == {7.0}
    assert {worker._channels._timeout for worker in made} == {timedelta(seconds=7) + BACKSTOP}


def test_forwards_stay_in_order_on_one_rank(program: pc.Program) -> None:
    kinds = [item.kind for item in program.instructions(0)]
    assert kinds == [*[Kind.FORWARD, Kind.BACKWARD] * MICROBATCHES, Kind.SHARE_LOSS]
