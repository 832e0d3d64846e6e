"""Weight stashing: a backward uses the weights of its forward, and versions end with their use."""

import weakref
from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import parcompiler as pc
from parcompiler import runtime
from parcompiler.instruction import Kind
from parcompiler.runtime.stage import Stage
from parcompiler.runtime.versions import Versions
from parcompiler.schedules import build
from parcompiler.schedules.staleness import staleness, versions
from tests.runtime.workers import batch, compiled, mixed

MICROBATCHES = 3


class Layer(runtime.Layer):
    """A layer with a frozen bias."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(2, dtype=torch.float64) / 2)
        self.bias = nn.Parameter(torch.ones(2, dtype=torch.float64), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias).tanh()


class Toy(Stage):
    """One layer that runs twice, a weight with two paths, and a count of forwards."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()
        self.scale = nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.same = self.scale
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.layer(self.layer(x) * self.scale)
        return (x * self.same).square().sum()


def count(kept: Versions, j: int) -> int:
    """The number of versions of the weights of stage `j` in memory, the current one included."""
    older = {id(version) for (stage, _), version in kept._used.items() if stage == j}
    return len(older - {id(kept._current.get(j))}) + 1


def run(
    order: Iterable[tuple[Kind, int]],
    before: Callable[[Versions, Kind, int], None] = lambda *_: None,
) -> tuple[Toy, list[torch.Tensor]]:
    """A stage after an order of compute with an update behind each backward, and its gradients."""
    stage, kept, gradients = Toy(), Versions(), list[torch.Tensor]()
    optimizer = torch.optim.SGD([p for p in stage.parameters() if p.requires_grad], 0.1, 0.9)
    losses = {}

    def step() -> None:
        gradients.append(grad(stage))
        optimizer.step()
        optimizer.zero_grad()

    for kind, i in order:
        before(kept, kind, i)
        if kind is Kind.FORWARD:
            losses[i] = kept.forward(stage, 0, i, {"x": data(i)})
        else:
            losses.pop(i).backward()
            kept.update(stage, 0, i, step)
    assert count(kept, 0) == 1
    return stage, gradients


def data(i: int) -> torch.Tensor:
    """The input of a micro-batch."""
    generator = torch.Generator().manual_seed(i)
    return torch.randn(3, 2, dtype=torch.float64, generator=generator)


def order(ranks: int, microbatches: int, rank: int = 0) -> Iterator[tuple[Kind, int]]:
    """What a rank computes."""
    actions = build("pipedream", ranks, microbatches).orders[rank]
    return ((action.kind, action.microbatch) for action in actions)


def by_hand(ranks: int, microbatches: int) -> tuple[Toy, list[torch.Tensor]]:
    """The same from the definition: a whole copy of the stage for every forward."""
    stage, copies, gradients = Toy(), dict[int, Toy](), list[torch.Tensor]()
    own = [p for p in stage.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(own, 0.1, 0.9)
    for kind, i in order(ranks, microbatches):
        if kind is Kind.FORWARD:
            copies[i] = Toy()
            copies[i].load_state_dict(stage.state_dict())
            continue
        copy = copies.pop(i)
        copy(data(i)).backward()
        for parameter, twin in zip(stage.parameters(), copy.parameters(), strict=True):
            parameter.grad = twin.grad
        gradients.append(grad(stage))
        optimizer.step()
    return stage, gradients


def grad(stage: Toy) -> torch.Tensor:
    """A copy of the gradient of its layer."""
    assert stage.layer.weight.grad is not None
    return stage.layer.weight.grad.clone()


@pytest.mark.parametrize("microbatches", [1, 2, 4, 9])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_gradients_are_those_of_the_weights_of_the_forward(ranks: int, microbatches: int) -> None:
    wanted, wanted_gradients = by_hand(ranks, microbatches)
    found, gradients = run(order(ranks, microbatches))
    assert len(gradients) == microbatches
    assert all(map(torch.equal, gradients, wanted_gradients))
    for name, parameter in wanted.named_parameters():
        assert torch.equal(found.get_parameter(name), parameter), name
    assert found.calls == microbatches


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("microbatches", [1, 2, 4, 7, 12])
def test_there_are_as_many_versions_as_predicted_and_no_more_than_in_flight(
    microbatches: int, rank: int
) -> None:
    schedule = build("pipedream", 4, microbatches)
    counts = []
    run(order(4, microbatches, rank), lambda kept, kind, i: counts.append(count(kept, 0)))
    assert max(counts) == versions(schedule.orders[rank], rank) <= schedule.in_flight(rank)


def test_memory_of_versions_is_freed_with_their_last_micro_batch() -> None:
    seen: list[weakref.ref[torch.Tensor]] = []
    alive = []

    def look(kept: Versions, kind: Kind, i: int) -> None:
        for version in kept._used.values():
            leaf = version["layer.weight"]
            if all(leaf is not known() for known in seen):
                seen.append(weakref.ref(leaf))
        alive.append(sum(known() is not None for known in seen))

    run(order(4, 20), look)
    assert len(seen) == 20 - 3  # the first four share one
    assert max(alive) == 4
    assert not any(known() is not None for known in seen)


def test_two_micro_batches_of_one_version_share_its_memory() -> None:
    stage, kept = Toy(), Versions()
    for i in range(3):
        kept.forward(stage, 0, i, {"x": data(i)})
    assert count(kept, 0) == 1
    leaves = [kept._used[0, i]["layer.weight"] for i in range(3)]
    assert leaves[0] is leaves[1] is leaves[2]
    assert leaves[0].data_ptr() == stage.layer.weight.data_ptr()


def test_the_ages_of_weights_are_those_of_pipedream() -> None:
    schedule = build("pipedream", 4, 16)
    assert [staleness(schedule.orders[r], r) for r in range(4)] == [3, 2, 1, 0]
    assert [versions(schedule.orders[r], r) for r in range(4)] == [4, 3, 2, 1]


# Workers


def pieces(data: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """The micro-batches of a batch."""
    return [{k: t[2 * i : 2 * i + 2] for k, t in data.items()} for i in range(MICROBATCHES)]


@pytest.fixture(scope="module")
def program() -> pc.Program:
    return compiled(mixed(), MICROBATCHES, schedule="pipedream")


def test_every_micro_batch_is_a_minibatch_of_its_own(program: pc.Program) -> None:
    model = mixed()
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.01)
    with program.worker() as worker:
        worker.set_optimizer(torch.optim.AdamW, lr=0.01)
        for seed in range(3):
            losses = []
            for piece in pieces(batch(MICROBATCHES, seed)):
                loss = model(**piece)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
            found = worker.train_step(batch(MICROBATCHES, seed))
            assert torch.allclose(found, torch.stack(losses).mean(), rtol=1e-6)
        state = worker.gather_state_dict()
        gradients = worker.gather_gradients()
    assert state is not None
    for name, tensor in model.state_dict().items():
        assert torch.allclose(state[name], tensor, rtol=1e-5, atol=1e-6), name
    assert gradients == {}


def test_a_step_without_updates_is_refused_and_breaks_nothing(program: pc.Program) -> None:
    with program.worker() as worker:
        with pytest.raises(pc.InputError, match=r"call worker\.set_optimizer.* before train_step"):
            worker.train_step(batch(MICROBATCHES))
        worker.set_optimizer(torch.optim.SGD, lr=0.1)
        for call in (lambda: worker.step(batch(MICROBATCHES)), worker.optimizer_step):
            with pytest.raises(
                pc.InputError,
                match=r"^pipedream updates parameters inside the step: call train_step$",
            ):
                call()
        assert worker.train_step(batch(MICROBATCHES)).isfinite()


def test_an_evaluation_uses_the_current_weights_and_changes_nothing(program: pc.Program) -> None:
    data = batch(MICROBATCHES)
    with program.worker() as worker:
        worker.set_optimizer(torch.optim.SGD, lr=0.1)
        first = worker.evaluate(data)
        assert torch.equal(worker.evaluate(data), first)
        worker.train_step(data)
        state = worker.gather_state_dict()
        found = worker.evaluate(data)
    assert state is not None
    model = mixed()
    model.load_state_dict(state)
    model.eval()
    losses = [model(**piece) for piece in pieces(data)]
    assert torch.allclose(found, torch.stack(losses).mean(), rtol=1e-6)
    assert not torch.equal(found, first)


def test_a_trace_has_the_updates(program: pc.Program) -> None:
    with program.worker() as worker:
        worker.set_optimizer(torch.optim.SGD, lr=0.1)
        worker.record()
        worker.train_step(batch(MICROBATCHES))
        found = [record.instruction for record in worker.trace()]
    assert found == list(program.instructions(0))
    assert sum(line.kind is Kind.UPDATE for line in found) == MICROBATCHES


def test_the_optimizer_steps_once_for_every_micro_batch(program: pc.Program) -> None:
    with program.worker() as worker:
        optimizer = worker.set_optimizer(torch.optim.AdamW, lr=0.1)
        steps: list[int] = []
        optimizer.register_step_post_hook(lambda *_: steps.append(1))
        worker.train_step(batch(MICROBATCHES))
    assert len(steps) == MICROBATCHES


def test_a_failing_update_is_named() -> None:
    program = compiled(mixed(), MICROBATCHES, schedule="pipedream")
    with program.worker() as worker:
        optimizer = worker.set_optimizer(torch.optim.SGD, lr=0.1)

        def fail(*_: object) -> None:
            raise ZeroDivisionError

        optimizer.register_step_pre_hook(fail)
        with pytest.raises(pc.LaunchError, match="rank 0 failed at 'UPDATE stage 0 mb 0'"):
            worker.train_step(batch(MICROBATCHES))
