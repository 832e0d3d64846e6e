"""Collectives by hand: rings and trees, within and between nodes, of gloo and of NCCL."""

import dataclasses
import math

import pytest
import torch

import parcompiler as pc
from parcompiler.cost import collective
from parcompiler.cost.collective import (
    RankGroup,
    among,
    between,
    group,
    joined,
    message,
    neighbours,
    seconds,
    slowest,
)
from parcompiler.cost.operation import EXCHANGE, Operation
from parcompiler.cost.roofline import operation_seconds
from parcompiler.device import Device, Link, device
from parcompiler.efficiency import COLLECTIVES, Curve

A, B = 1e-6, 1e-4  # latencies within and between nodes
FAST, SLOW = 1e9, 1e8  # bandwidths
DEVICE = dataclasses.replace(device("cpu"), link=Link(FAST, A), network=Link(SLOW, B))
H100 = device("h100")
LARGE = 1e12  # bytes, of which latencies do not show


def measured(action: str, fraction: float) -> Device:
    """The device with a curve of a collective."""
    curves = (Curve(action, "any", ((1.0, fraction),)),)
    efficiency = dataclasses.replace(DEVICE.efficiency, curves=curves)
    return dataclasses.replace(DEVICE, efficiency=efficiency)


@pytest.mark.parametrize(
    ("action", "share"),
    [
        ("all-reduce", 14 / 8),
        ("all-gather", 7 / 8),
        ("reduce-scatter", 7 / 8),
        ("all-to-all", 7 / 64),
        ("rotation", 7 / 8),
        ("broadcast", 1.0),
        ("reduce", 1.0),
    ],
)
def test_many_bytes_take_the_bandwidth_of_a_ring(action: str, share: float) -> None:
    assert seconds(action, LARGE, RankGroup(8), DEVICE) == pytest.approx(share * LARGE / FAST)


@pytest.mark.parametrize(
    ("action", "steps"),
    [("all-reduce", 6), ("all-gather", 3), ("broadcast", 3), ("all-to-all", 1), ("rotation", 7)],
)
def test_few_bytes_take_the_latencies_of_a_tree(action: str, steps: int) -> None:
    assert seconds(action, 0, RankGroup(8), DEVICE) == pytest.approx(steps * A)


def test_the_cheaper_of_ring_and_tree_is_taken() -> None:
    n, nbytes = 8, 50_000.0
    ring = 2 * (n - 1) * A + 2 * (n - 1) / n * nbytes / FAST
    tree = 2 * math.log2(n) * A + 2 * nbytes / FAST
    assert seconds("all-reduce", nbytes, RankGroup(n), DEVICE) == pytest.approx(min(ring, tree))
    assert seconds("all-reduce", 0, RankGroup(n), DEVICE) < 2 * (n - 1) * A


def test_a_device_file_may_have_a_curve_of_every_collective() -> None:
    assert set(COLLECTIVES) == {*collective.SENT, *collective.ROOTED}


def test_one_rank_has_nothing_to_say() -> None:
    assert seconds("all-reduce", LARGE, RankGroup(1), DEVICE) == 0


def test_between_nodes_a_ring_goes_over_the_adapters_of_all_ranks() -> None:
    n, nodes = 16, 2
    found = seconds("all-reduce", LARGE, RankGroup(n, nodes), DEVICE)
    assert found == pytest.approx(2 * (n - 1) / n * LARGE / min(FAST, 8 * SLOW), rel=1e-4)
    assert found > seconds("all-reduce", LARGE, RankGroup(n), DEVICE)


@pytest.mark.parametrize(
    ("action", "nbytes", "microseconds"),
    [
        # by hand from NCCL's table: the kernel, the steps, the bytes by what goes round
        ("all-reduce", 64, 6.6 + 2 * 7 * 0.6),  # LL: flags among the bytes
        ("all-reduce", 2**23, 14 + 14 * 1.9 + 14 / 8 * 2**23 / (0.92 * 370.8e3)),  # LL128
        ("all-gather", 2**30, 8.4 + 7 * 3.4 + 7 / 8 * 2**30 / 370.8e3),  # Simple
    ],
)
def test_accelerators_take_the_cheapest_of_the_protocols_of_nccl(
    action: str, nbytes: float, microseconds: float
) -> None:
    found = seconds(action, nbytes, RankGroup(8), H100)
    assert found == pytest.approx(1e-6 * microseconds, rel=0.02)


def test_ranks_alone_on_their_nodes_gather_few_bytes_over_a_tree() -> None:
    alone = RankGroup(128, nodes=128)
    steps = 8 + 7 * 14 / 3.5 + 128 * 2.8
    assert seconds("all-gather", 2**10, alone, H100) == pytest.approx(1e-6 * steps, rel=0.01)
    ring = 127 / 128 * 2**36 / (0.96 * H100.network.bandwidth)
    assert seconds("all-gather", 2**36, alone, H100) == pytest.approx(ring, rel=0.01)


def test_ranks_alone_on_their_nodes_have_one_adapter_each() -> None:
    found = seconds("all-reduce", LARGE, RankGroup(4, nodes=4), DEVICE)
    assert found == pytest.approx(6 / 4 * LARGE / SLOW, rel=1e-6)
    assert seconds("broadcast", 0, RankGroup(4, nodes=4), DEVICE) == pytest.approx(2 * B)


def test_pieces_for_other_nodes_hold_up_those_for_neighbours() -> None:
    found = seconds("all-to-all", LARGE, RankGroup(16, nodes=2), DEVICE)
    assert found == pytest.approx(8 * LARGE / 16**2 / SLOW + B)


def test_the_axis_says_which_nodes_a_group_is_on() -> None:
    mesh = pc.Mesh(pipeline=4, data=4, tensor=2, device="h100")
    assert neighbours(2, DEVICE) == RankGroup(2)
    assert neighbours(16, DEVICE) == RankGroup(16, nodes=2)
    assert group(mesh.grid.replicas((0,)), DEVICE) == RankGroup(4)
    assert group(mesh.grid.plane(0), DEVICE) == RankGroup(8, nodes=4)
    assert group(range(0, 64, 8), DEVICE).local == 1


@pytest.mark.parametrize(
    ("shape", "pair", "crosses"),
    [
        ({"pipeline": 8}, (0, 7), False),
        ({"pipeline": 16}, (7, 8), True),
        ({"pipeline": 16}, (8, 9), False),
        ({"pipeline": 2, "tensor": 4}, (0, 1), False),
        ({"pipeline": 3, "tensor": 4}, (1, 2), True),
        ({"pipeline": 2, "tensor": 8}, (0, 1), True),
        ({"pipeline": 2, "data": 3, "tensor": 2}, (0, 1), True),  # of ranks 2 and 8, say
    ],
)
def test_a_message_takes_the_slowest_link_of_all_replicas(
    shape: dict[str, int], pair: tuple[int, int], crosses: bool
) -> None:
    mesh = pc.Mesh(**shape, device=DEVICE)
    assert between(mesh, *pair) == (DEVICE.network if crosses else DEVICE.link)
    assert between(mesh, *reversed(pair)) == between(mesh, *pair)


def test_a_value_for_several_ranks_takes_as_long_as_to_the_farthest() -> None:
    mesh = pc.Mesh(pipeline=16, device=DEVICE)
    near, far = DEVICE.link.seconds(8), DEVICE.network.seconds(8)
    assert collective.message(mesh, [(0, 1), (0, 2)], 8) == near
    assert collective.message(mesh, [(0, 1), (0, 9)], 8) == far


def test_a_measured_curve_says_what_a_collective_reaches() -> None:
    found = seconds("all-reduce", 800.0, RankGroup(4), measured("all-reduce", 0.25))
    assert found == DEVICE.link.seconds(1200.0 / 0.25)
    slow = seconds("all-reduce", LARGE, RankGroup(4, nodes=4), measured("all-reduce", 0.25))
    assert slow == pytest.approx(4 * 6 / 4 * LARGE / SLOW, rel=1e-6)


def test_messages_within_a_node_reach_what_their_curve_says() -> None:
    slow = measured("message", 0.5)
    assert collective.carried(slow.link, 8, slow) == slow.link.seconds(16)
    assert collective.carried(slow.network, 8, slow) == slow.network.seconds(8)


def test_an_operation_of_ranks_is_a_collective_of_neighbours() -> None:
    sent = 2 * 3 / 4 * 1000.0
    told = Operation("all-reduce", EXCHANGE, 0.0, sent, torch.float32, ranks=4)
    wanted = seconds("all-reduce", 1000.0, RankGroup(4), DEVICE)
    assert operation_seconds(told, DEVICE) == pytest.approx(wanted)
    wide = dataclasses.replace(told, nbytes=2 * 15 / 16 * 1000.0, ranks=16)
    wanted = seconds("all-reduce", 1000.0, RankGroup(16, nodes=2), DEVICE)
    assert operation_seconds(wide, DEVICE) == pytest.approx(wanted)


def mixed(*devices: Device, copies: int = 1) -> pc.Mesh:
    """A pipeline of devices whose nodes have four places."""
    nodes = [dataclasses.replace(one, devices_per_node=4) for one in devices]
    return pc.Mesh(pipeline=len(devices), data=copies, device=nodes)


def test_unequal_devices_are_on_nodes_of_their_own() -> None:
    other = dataclasses.replace(DEVICE, name="cpu-other", network=Link(2 * SLOW, 3 * B))
    mesh = mixed(DEVICE, DEVICE, other, other, other, DEVICE)
    assert between(mesh, 0, 1) == DEVICE.link
    assert between(mesh, 1, 2) == between(mesh, 2, 1) == Link(SLOW, 3 * B)  # the worse of both
    assert between(mesh, 2, 4) == other.link
    assert between(mesh, 0, 5) == DEVICE.network
    assert slowest(mesh) == Link(SLOW, 3 * B)
    assert message(mesh, [(0, 1), (1, 2)], LARGE) == pytest.approx(LARGE / SLOW)
    assert [among(mesh, ranks).nodes for ranks in ((0, 1), (1, 2), (0, 5), range(6))] == [
        1,
        2,
        2,
        3,
    ]


def test_a_node_of_unequal_devices_begins_where_they_do() -> None:
    other = dataclasses.replace(DEVICE, name="cpu-other")
    mesh = mixed(DEVICE, other, other, other, copies=2)  # ranks 0 1 | 2 3 4 5 | 6 7
    assert between(mesh, 1, 2) == other.link
    assert between(mesh, 2, 3) == other.network
    assert among(mesh, range(2, 6)).nodes == 1
    assert among(mesh, range(8)).nodes == 3


def test_ranks_of_unequal_devices_wait_for_the_slowest() -> None:
    slow = dataclasses.replace(DEVICE, name="cpu-slow", network=Link(SLOW / 4, B))
    mesh, pair = mixed(DEVICE, slow), RankGroup(2, nodes=2)
    taken = joined(mesh, "all-reduce", LARGE, (0, 1))
    assert taken == seconds("all-reduce", LARGE, pair, slow)
    assert taken > seconds("all-reduce", LARGE, pair, DEVICE)
    assert joined(mesh, "all-reduce", LARGE, (0,)) == 0
