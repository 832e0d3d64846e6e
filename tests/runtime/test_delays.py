"""Every schedule gives the same bits, whenever its messages arrive and whoever runs first."""

from collections.abc import Callable, Sequence
from functools import cache, partial

import pytest
import torch
from torch import nn

from parcompiler.capture import capture
from parcompiler.capture.clean import simplify
from parcompiler.graph import Graph
from parcompiler.models import gpt, t5
from parcompiler.runtime.batch import microbatches
from parcompiler.runtime.program import RankProgram, Value
from parcompiler.schedules import ASYNCHRONOUS, SCHEDULES
from tests.runtime.delays import BLOCKING, EAGER, HABITS, LATE, Deadlock, DelayedChannels, Network
from tests.runtime.ranks import Ranks, divided, reference, same

MICROBATCHES = 4
SYNCHRONOUS = [name for name in SCHEDULES if name != ASYNCHRONOUS]
SEEDS = {"gpt": 30, "t5": 15}  # of 2 ranks, and of 4
MANY = {"gpt": 200, "t5": 100}  # in the long sweep


@cache
def captured(name: str) -> tuple[nn.Module, Graph]:
    """A tiny model of eight blocks or more; values of T5 skip stages."""
    torch.manual_seed(0)
    tokens = torch.randint(16, (1, 4))
    inputs = {"tokens": tokens, "labels": tokens}
    if name == "gpt":
        model: nn.Module = gpt.GPT(gpt.Config(6, 2, 8, vocabulary=16, sequence=4, tied=False))
    else:
        model = t5.T5(t5.Config(3, 2, 8, vocabulary=16, sequence=4))
        inputs["decoder_tokens"] = tokens
    return model, simplify(capture(model, inputs))


def check(name: str, schedule: str, count: int, seeds: int) -> None:
    """As many orders of events give the bits of the first, and the gradients of one process."""
    model, graph = captured(name)
    ranks = Ranks(divided(graph, schedule, count, MICROBATCHES))
    first = ranks.step(0)
    for seed in range(1, seeds):
        assert ranks.step(seed) == first, f"seed {seed}"
    loss, gradients = reference(model, ranks)
    if name == "gpt":  # no value has several readers and no tensor several owners
        assert torch.equal(first.losses[0], loss)
        assert same(first.named, gradients)
    torch.testing.assert_close(first.losses, (loss,) * count)
    torch.testing.assert_close(first.named, gradients, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("schedule", SYNCHRONOUS)
@pytest.mark.parametrize("name", ["gpt", "t5"])
def test_every_order_of_events_gives_the_same_bits(name: str, schedule: str, count: int) -> None:
    check(name, schedule, count, SEEDS[name])


@pytest.mark.sweep
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("schedule", SYNCHRONOUS)
@pytest.mark.parametrize("name", ["gpt", "t5"])
def test_many_orders_of_events_give_the_same_bits(name: str, schedule: str, count: int) -> None:
    check(name, schedule, count, MANY[name])


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        *(("gpt", schedule) for schedule in SCHEDULES),
        *(("t5", schedule) for schedule in SYNCHRONOUS),
    ],
)
def test_an_evaluation_of_fewer_micro_batches_is_that_of_one_process(
    name: str, schedule: str
) -> None:
    model, graph = captured(name)
    ranks = Ranks(divided(graph, schedule, 2, MICROBATCHES, data=1 + (schedule == "1f1b")))
    for count in range(1, MICROBATCHES):
        with torch.no_grad():
            losses = [
                model(**{ranks.programs[0].inputs[n].key: tensor for n, tensor in piece.items()})
                for batch in ranks.batches
                for piece in microbatches(ranks.programs[0], batch)[:count]
            ]
        for seed in range(len(HABITS)):
            for found in ranks.evaluation(count, seed):
                torch.testing.assert_close(found, torch.stack(losses).mean())


VALUE = Value((1,), torch.float32)


def run(bodies: Sequence[Callable[[DelayedChannels], object]], seed: int, habit: str) -> list[str]:
    """Run a function on each rank's channels; what it returns, as text."""
    network = Network(len(bodies), seed, habit)
    ends = [DelayedChannels(program(rank, len(bodies)), network) for rank in range(len(bodies))]
    return list(map(str, network.run([partial(b, e) for b, e in zip(bodies, ends, strict=True)])))


def program(rank: int, size: int) -> RankProgram:
    return RankProgram(rank, size, "cpu", 1, "0", torch.float32, (), (), ())


def sender(*numbers: float, to: int) -> Callable[[DelayedChannels], None]:
    def body(channels: DelayedChannels) -> None:
        for number in numbers:
            channels.send(torch.tensor([float(number)]), VALUE, to)
        channels.flush()

    return body


@pytest.mark.parametrize("habit", HABITS)
def test_messages_of_one_channel_keep_their_order(habit: str) -> None:
    def receiver(channels: DelayedChannels) -> list[float]:
        receipts = [channels.receive(VALUE, 0) for _ in range(3)]
        return [receipt.wait().item() for receipt in receipts[::-1]]

    for seed in range(20):
        assert run([sender(1, 2, 3, to=1), receiver], seed, habit)[1] == "[3.0, 2.0, 1.0]"


def test_messages_of_different_channels_come_in_any_order() -> None:
    def receiver(channels: DelayedChannels) -> list[bool]:
        first, second = channels.receive(VALUE, 0), channels.receive(VALUE, 1)
        first.wait()
        return [bool(second.tensor.isnan())]

    bodies = [sender(1, to=2), sender(2, to=2), receiver]
    assert {run(bodies, seed, EAGER)[2] for seed in range(20)} == {"[True]", "[False]"}


@pytest.mark.parametrize("habit", HABITS)
def test_a_seed_is_one_order_of_events(habit: str) -> None:
    def events(seed: int) -> list[str]:
        found: list[str] = []

        def body(channels: DelayedChannels, rank: int) -> None:
            for _ in range(4):
                found.append(str(rank))
                receipt = channels.receive(VALUE, 1 - rank)
                channels.send(torch.zeros(1), VALUE, 1 - rank)
                receipt.wait()

        run([partial(body, rank=0), partial(body, rank=1)], seed, habit)
        return found

    assert all(events(seed) == events(seed) for seed in range(5))
    assert len({tuple(events(seed)) for seed in range(20)}) > 1


@pytest.mark.parametrize("habit", [LATE, BLOCKING])
def test_a_tensor_that_is_changed_behind_a_send_arrives_changed(habit: str) -> None:
    def body(channels: DelayedChannels) -> None:
        tensor = torch.zeros(1)
        channels.send(tensor, VALUE, 1)
        tensor += 1

    def receiver(channels: DelayedChannels) -> float:
        return channels.receive(VALUE, 0).wait().item()

    assert "1.0" in {run([body, receiver], seed, habit)[1] for seed in range(20)}


def test_sends_that_face_each_other_wait_for_ever_where_sends_block() -> None:
    def body(channels: DelayedChannels, peer: int) -> None:
        channels.send(torch.zeros(1), VALUE, peer)
        channels.receive(VALUE, peer).wait()

    bodies = [partial(body, peer=1), partial(body, peer=0)]
    for habit in (EAGER, LATE):
        run(bodies, 0, habit)
    with pytest.raises(Deadlock, match="rank 0 sends message 0 to rank 1\nrank 1 sends message 0"):
        run(bodies, 0, BLOCKING)


@pytest.mark.parametrize("habit", HABITS)
def test_a_message_that_nobody_sends_is_waited_for_in_vain(habit: str) -> None:
    def receiver(channels: DelayedChannels) -> None:
        channels.receive(VALUE, 0).wait()

    with pytest.raises(Deadlock, match="rank 1 waits for message 0 of rank 0"):
        run([sender(to=1), receiver], 0, habit)


def test_what_a_rank_raises_ends_the_others() -> None:
    def failing(channels: DelayedChannels) -> None:
        raise ZeroDivisionError

    def receiver(channels: DelayedChannels) -> None:
        channels.receive(VALUE, 0).wait()

    with pytest.raises(ZeroDivisionError):
        run([failing, receiver], 0, EAGER)


@pytest.mark.parametrize("habit", HABITS)
def test_collectives_wait_for_all_their_ranks(habit: str) -> None:
    def body(channels: DelayedChannels, rank: int) -> list[float]:
        tensor = torch.tensor([float(rank)])
        channels.sum(tensor, (0, 1, 2))
        shared = torch.tensor([float(rank)])
        channels.broadcast(shared, 2)
        return [tensor.item(), shared.item()]

    for seed in range(5):
        bodies = [partial(body, rank=rank) for rank in range(3)]
        assert run(bodies, seed, habit) == ["[3.0, 2.0]"] * 3
