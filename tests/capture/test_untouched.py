"""What a captured graph would leave out is refused by name, and the model is left as it was."""

import copy
import itertools
import re
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import parcompiler as pc
from parcompiler.capture import capture
from parcompiler.capture.narrow import capture_in
from parcompiler.capture.untouched import untouched
from parcompiler.errors import CaptureError

Step = Callable[[Any, torch.Tensor], Any]
X = {"x": torch.ones(2, 4)}
OUTSIDE = nn.Linear(4, 4)


class Model(nn.Module):
    """Two layers and a loss; `step` is what its forward does in between."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.steps = (step,)
        self.count, self.numbers = 0, Numbers()
        self.list: list[Any] = []
        self.turns, self.factors = itertools.count(1), iter([2.0, 3.0, 4.0, 5.0])
        self.table: dict[str, int] = {}
        self.state: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> Any:
        x = self.steps[0](self, torch.tanh(self.norm(self.first(x))))
        return self.last(x).square().mean()


class Numbers:
    """An object that is no module."""

    seen = 0


def counts_and_asks(self: Any, x: torch.Tensor) -> Any:
    self.count += 1
    return x * self.count


def asks_before_it_counts(self: Any, x: torch.Tensor) -> Any:
    if self.count > 100:
        x = x * 2
    self.count += 1
    return x


def appends(self: Any, x: torch.Tensor) -> Any:
    self.list.append(1)
    return x * len(self.list)


def fills_a_table(self: Any, x: torch.Tensor) -> Any:
    self.table["calls"] = self.table.get("calls", 0) + 1
    return x


def counts_and_asks_an_object(self: Any, x: torch.Tensor) -> Any:
    self.numbers.seen += 1
    return x * self.numbers.seen


def counts_by_an_iterator(self: Any, x: torch.Tensor) -> Any:
    return x * next(self.turns)


def takes_what_is_left(self: Any, x: torch.Tensor) -> Any:
    return x * next(self.factors)


def reads_its_last_output(self: Any, x: torch.Tensor) -> Any:
    y = x if self.state is None else x + self.state
    self.state = x.detach()
    return y


def reads_and_writes_in_one_line(self: Any, x: torch.Tensor) -> Any:
    x, self.state = (x if self.state is None else x + self.state), x.detach()
    return x


def counts_and_asks_in_one_line(self: Any, x: torch.Tensor) -> Any:
    self.count += 1; x = x * self.count  # noqa: E702  # fmt: skip
    return x


def counts_and_returns_in_one_line(self: Any, x: torch.Tensor) -> Any:
    def counted() -> int: self.count += 1; return int(self.count)  # noqa: E702  # fmt: skip

    return x * counted()


def asks_in_the_line_that_counts(self: Any, x: torch.Tensor) -> Any:
    self.count, x = self.count + 1, x * (self.count + 1)
    return x


def assigns_a_buffer(self: Any, x: torch.Tensor) -> Any:
    self.norm.running_mean = self.norm.running_mean * 0.5
    return x


def assigns_a_buffer_that_no_checkpoint_holds(self: Any, x: torch.Tensor) -> Any:
    if not hasattr(self, "slopes"):
        self.register_buffer("slopes", torch.arange(4.0, device=x.device), persistent=False)
    self.slopes = self.slopes + 1
    return x + self.slopes


@pytest.mark.parametrize(
    ("step", "name"),
    [
        (counts_and_asks, "count"),
        (asks_before_it_counts, "count"),
        (appends, "list"),
        (fills_a_table, "table"),
        (counts_and_asks_an_object, "numbers.seen"),
        (counts_by_an_iterator, "turns"),
        (takes_what_is_left, "factors"),
        (reads_its_last_output, "state"),
        (reads_and_writes_in_one_line, "state"),
        (counts_and_asks_in_one_line, "count"),
        (counts_and_returns_in_one_line, "count"),
        (asks_in_the_line_that_counts, "count"),
        (assigns_a_buffer, "norm.running_mean"),
        (assigns_a_buffer_that_no_checkpoint_holds, "slopes"),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_a_forward_reads_of_an_earlier_one_is_refused(
    step: Step, name: str, device: str
) -> None:
    with torch.device(device):
        model = Model(step)
    with pytest.raises(CaptureError, match=rf"earlier forwards have changed \({name}\)"):
        capture(model, X)
    assert (model.count, model.list, model.table, model.state) == (0, [], {}, None)
    assert "seen" not in vars(model.numbers)
    assert int(model.norm.num_batches_tracked or 0) == 0 if device == "cpu" else True


def counts(self: Any, x: torch.Tensor) -> Any:
    self.count += 1
    return x


def counts_beside_something_else(self: Any, x: torch.Tensor) -> Any:
    self.count += 1; x = x * 2  # noqa: E702  # fmt: skip
    return x


def counts_by_name_over_two_lines(self: Any, x: torch.Tensor, name: str = "count") -> Any:
    setattr(
        self, name, self.count + 1
    )  # fmt: skip
    return x


def keeps_what_it_made(self: Any, x: torch.Tensor) -> Any:
    self.state = x * 2
    return x


def writes_before_it_reads(self: Any, x: torch.Tensor) -> Any:
    self.list = []
    self.list.append(x * 2)
    return torch.stack(self.list).sum(0)


def counts_in_an_object(self: Any, x: torch.Tensor) -> Any:
    self.numbers.seen += 1
    return x


def hands_over_in_an_object(self: Any, x: torch.Tensor) -> Any:
    self.numbers.last = torch.tanh(x)
    return x + self.numbers.last


def makes_a_table_once(self: Any, x: torch.Tensor) -> Any:
    if self.state is None or len(self.state) < len(x):
        self.state = torch.arange(len(x)).unsqueeze(1).to(x.dtype)
    return x + self.state


def registers_a_buffer_once(self: Any, x: torch.Tensor) -> Any:
    if not hasattr(self, "slopes"):
        self.register_buffer("slopes", torch.arange(4.0), persistent=False)
    return x + self.slopes


def registers_a_buffer_each_time(self: Any, x: torch.Tensor) -> Any:
    self.register_buffer("slopes", torch.arange(4.0), persistent=False)
    return x + self.slopes


@pytest.mark.parametrize(
    "step",
    [
        counts, counts_beside_something_else, counts_by_name_over_two_lines, keeps_what_it_made,
        writes_before_it_reads, counts_in_an_object, hands_over_in_an_object, makes_a_table_once,
        registers_a_buffer_once, registers_a_buffer_each_time,
    ],
)  # fmt: skip
def test_what_no_later_forward_depends_on_is_captured(
    step: Step,
) -> None:
    model = Model(step)
    before = {**vars(model)}
    capture(model, X)
    assert vars(model) == before
    assert [name for name, _ in model.named_buffers() if name == "slopes"] == []


CALLS = 0
LOG: list[int] = []


def counts_globally(self: Any, x: torch.Tensor) -> Any:
    global CALLS
    CALLS += 1
    return x * CALLS


class Outside(Model):
    """Keeps state in places that are not its own."""

    seen = 0

    def __init__(self) -> None:
        super().__init__(lambda self, x: x)

    def forward(self, x: torch.Tensor) -> Any:
        Outside.seen += 1
        LOG.append(1)
        return super().forward(counts_globally(self, x) * Outside.seen * len(LOG))


def test_state_outside_of_the_model_is_warned_of(capfd: pytest.CaptureFixture[str]) -> None:
    capture(Outside(), X)
    text = capfd.readouterr().err
    assert "each forward changes Outside.seen, the global CALLS, the global LOG, outside" in text
    before = Outside.seen, CALLS, list(LOG)
    with untouched(model := Outside()):
        model(**X)
    assert (Outside.seen, CALLS, LOG) == before
    capture(Model(counts), X)
    assert not capfd.readouterr().err


def half(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * 0.5


def cleared(parameter: torch.Tensor) -> None:
    parameter.grad = None


def unchanged(*_: object) -> None:
    """A hook of a module."""


@pytest.mark.parametrize("precision", [None, torch.bfloat16])
@pytest.mark.parametrize(
    ("owner", "register", "hook", "named"),
    [
        ("first.weight", "register_post_accumulate_grad_hook", cleared, "'first.weight'"),
        ("first", "register_full_backward_hook", unchanged, "module 'first'"),
        ("first", "register_full_backward_pre_hook", unchanged, "module 'first'"),
    ],
)
def test_hooks_on_gradients_are_refused_with_their_place(
    owner: str, register: str, hook: Any, named: str, precision: torch.dtype | None
) -> None:
    model = Model(counts)
    path, _, leaf = owner.rpartition(".")
    getattr(getattr(model.get_submodule(path), leaf), register)(hook)
    with pytest.raises(CaptureError) as caught:
        capture(model, X) if precision is None else capture_in(precision, model, X)
    assert str(caught.value).startswith(f"{named} has a hook that would not run on the ranks")
    assert re.search(rf"{hook.__name__}, .*test_untouched.py:\d+", str(caught.value))


def test_a_hook_that_a_forward_registers_is_refused_with_its_line() -> None:
    def hooked(self: Any, x: torch.Tensor) -> Any:
        x.register_hook(half)
        return x

    with pytest.raises(CaptureError, match=r"register_hook: half.*\n.*test_untouched.py:\d+"):
        capture(Model(hooked), X)


SEEN = ContextVar[list[torch.Tensor]]("seen")


def see(module: nn.Module, args: Any, made: torch.Tensor) -> None:
    SEEN.get().append(made)


class Recording(nn.Module):
    """The first forward hooks a layer, as those of transformers do; all return what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "hooked"):
            self.layer.register_forward_hook(see)
            self.hooked = True
        SEEN.set([])
        self.head(self.layer(x))
        return torch.stack(SEEN.get()).sum()


def test_hooks_of_modules_that_the_first_forward_registers_are_there_once() -> None:
    torch.manual_seed(0)
    model, x = Recording(), torch.ones(2, 4)
    expected = copy.deepcopy(model)(x)
    program = pc.compile(model, pc.Mesh(), (x,), microbatches=1, progress=False)
    assert not model.layer._forward_hooks
    found = program.verify()
    assert found.ok, str(found)
    assert not model.layer._forward_hooks
    assert model(x) == expected


@pytest.mark.parametrize("reentrant", [True, False])
def test_reentrant_checkpointing_is_refused(reentrant: bool) -> None:
    def again(self: Any, x: torch.Tensor) -> Any:
        return checkpoint(torch.tanh, x, use_reentrant=reentrant)

    if not reentrant:
        capture(Model(again), X)
        return
    with pytest.raises(CaptureError, match="pass use_reentrant=False"):
        capture(Model(again), X)


class Nested(nn.Module):
    """A checkpoint within another: torch.export runs all behind the inner one without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.second(x)
        return hidden.tanh()

    def outer(self, x: torch.Tensor) -> Any:
        return checkpoint(self.inner, self.first(x), use_reentrant=False).sin()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.third(checkpoint(self.outer, x, use_reentrant=False)).sum()
        return loss


def test_a_checkpoint_within_another_keeps_its_gradients() -> None:
    torch.manual_seed(0)
    model, x = Nested().double(), torch.randn(2, 4, dtype=torch.float64)
    program = pc.compile(model, pc.Mesh(), {"x": x}, microbatches=1)
    with program.worker() as worker:
        worker.step({"x": x})
        found = worker.gather_gradients()
    model(x).backward()
    assert found is not None
    assert found.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)


def doubled(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 2


def test_hooks_on_forwards_are_part_of_the_graph() -> None:
    model = Model(counts)
    plain = capture(model, X).fingerprint
    model.first.register_forward_hook(doubled)
    assert capture(model, X).fingerprint != plain


@pytest.mark.parametrize(
    "loss",
    [
        lambda y: OUTSIDE(y).square().mean(),
        lambda y: (y @ OUTSIDE.weight.T).mean(),
        lambda y: torch.cat([y, OUTSIDE.weight]).mean(),
    ],
)
@pytest.mark.parametrize("precision", [None, torch.bfloat16])
def test_parameters_that_no_module_registered_are_refused(
    loss: Any, precision: torch.dtype | None
) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(CaptureError, match=r"reads a parameter \(4, 4\).*would not be trained"):
        if precision is None:
            capture(model, (torch.ones(2, 4),), loss)
        else:
            capture_in(precision, model, (torch.ones(2, 4),), loss)


class Wrapped(nn.Module):
    """Has a forward that is a function around it, which a copy of the model shares."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.head = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)

        def forward(x: torch.Tensor) -> Any:
            bias = torch.stack([self.layer.bias, self.head.bias]).sum()
            return self.head(self.norm(self.layer(x))).square().mean() + bias

        self.forward = forward


def test_a_forward_that_closes_over_its_model_reads_the_models_own_parameters() -> None:
    model = Wrapped()
    graph = capture(model, X)
    assert [p.name for p in graph.parameters if p.trainable] == [
        name for name, _ in model.named_parameters()
    ]
    assert "norm.running_mean" in {p.name for p in graph.parameters if p.mutated}


class Criterion(nn.Module):
    """A loss that has a parameter."""

    def __init__(self, weight: Any) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, y: torch.Tensor) -> Any:
        return (y @ self.weight).square().mean()


@pytest.mark.parametrize("precision", [None, torch.bfloat16])
def test_parameters_of_a_loss_are_the_models(precision: torch.dtype | None) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4)), (torch.ones(2, 4),)

    def captured(loss: nn.Module) -> dict[str, Any]:
        graph = (
            capture(model, x, loss) if precision is None else capture_in(precision, model, x, loss)
        )
        return {p.name: (p.trainable, p.aliases, graph.tensors[p.name]) for p in graph.parameters}

    own = nn.Parameter(torch.ones(4, 4))
    trained, aliases, tensor = captured(Criterion(own))["loss.weight"]
    assert (trained, aliases, tensor is own) == (True, (), True)
    tied = captured(Criterion(model[0].weight))
    assert tied["0.weight"][1] == ("loss.weight",)
    assert "loss.weight" not in tied


def test_a_name_that_model_and_loss_share_is_refused() -> None:
    model = nn.Sequential()
    model.add_module("loss", nn.Linear(4, 4))
    with pytest.raises(CaptureError, match=r"both have a tensor 'loss.weight'"):
        capture(model, (torch.ones(2, 4),), Criterion(nn.Parameter(torch.ones(4, 4))))


class Frozen(dict[str, int]):
    """A configuration that nothing changes, as diffusers has it."""

    def clear(self) -> None:
        raise TypeError


def test_a_container_that_refuses_changes_is_left_alone() -> None:
    model = Model(lambda self, x: x * self.table["width"])
    model.table = table = Frozen(width=4)
    with untouched(model):
        capture(model, X)
    assert model.table is table


class Pair(tuple[int, int]):
    """A tuple that is no sequence, as the representations of e3nn are."""

    def __len__(self) -> int:
        raise NotImplementedError


def test_a_tuple_without_a_length_is_looked_into() -> None:
    def step(model: Any, x: torch.Tensor) -> Any:
        model.pair = Pair((1, model.pair[1] + 1))
        return x * model.pair[1]

    model: Any = Model(step)
    model.pair = Pair((1, 0))
    with pytest.raises(CaptureError, match=r"earlier forwards have changed \(pair\)"):
        capture(model, X)


@pytest.mark.parametrize("fails", [False, True])
def test_a_model_that_was_run_and_trained_is_as_it_was(fails: bool) -> None:
    model = Model(appends)
    handle = model.first.weight.register_hook(half)
    model(**X).backward()
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    before = {
        name: (tensor, tensor.data_ptr(), tensor.clone(), tensor.grad)
        for name, tensor in tensors.items()
    }
    attributes, chance, hooks = {**vars(model)}, torch.get_rng_state(), handle.hooks_dict_ref()
    try:
        with untouched(model, lambda tensor: torch.float64):
            torch.rand(3)
            assert model.first.weight.grad is None
            model(X["x"].double()).backward()
            assert model.first.weight.grad is not None
            torch.optim.SGD(model.parameters(), lr=1.0).step()
            model.register_buffer("more", torch.ones(1))
            model.requires_grad_(False)
            if fails:
                raise ZeroDivisionError
    except ZeroDivisionError:
        assert fails
    assert vars(model) == attributes
    assert model.list == [1]
    after = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert after.keys() == before.keys()
    for name, (tensor, place, values, gradient) in before.items():
        found = after[name]
        assert found is tensor
        assert (found.data_ptr(), found.dtype) == (place, values.dtype)
        assert torch.equal(found, values)
        assert found.grad is gradient
        assert found.requires_grad is (found.is_floating_point() and "running" not in name)
    assert torch.equal(chance, torch.get_rng_state())
    assert model.first.weight._backward_hooks == hooks is not None
