"""Messages between ranks that torchrun started."""

import dataclasses
from pathlib import Path

import parcompiler as pc
from parcompiler.calibrate.exchange import exchanges
from parcompiler.calibrate.journal import Journal
from parcompiler.calibrate.machine import find_machine
from tests.calibrate import rank
from tests.calibrate.machines import CORE
from tests.distributed import forked


def test_ranks_of_a_node_measure_their_link_and_the_first_of_the_next_node_the_network() -> None:
    machine = dataclasses.replace(CORE, ranks=8, ranks_per_node=4)
    found = {(one.action, one.place, one.ranks) for one in exchanges(machine)}
    node = (0, 1, 2, 3)
    collectives = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "rotation")
    assert found == {
        ("message", "link", (0, 1)),
        ("message", "network", (0, 4)),
        *((action, "link", node) for action in collectives),
    }


def test_a_rank_alone_on_its_node_measures_the_network() -> None:
    machine = dataclasses.replace(CORE, ranks=2, ranks_per_node=1)
    assert {(one.place, one.ranks) for one in exchanges(machine)} == {("network", (0, 1))}


def test_two_ranks_measure_what_a_run_before_them_did_not(tmp_path: Path) -> None:
    path = tmp_path / "two.json"
    machine = dataclasses.replace(find_machine(), threads=1, ranks=2, ranks_per_node=2)
    before = Journal(tmp_path / "two.json.measurements.jsonl", machine.fabric)
    before.add(next(exchanges(machine)).key, 0.25)
    assert "exchanges: 11" in forked.run(2, rank.main, str(path))
    device = pc.Device.load(path)
    assert (device.devices_per_node, device.link.latency) == (2, 0.25)
    sources = dict(device.sources)
    assert sources["link.latency"].startswith("measured on ")
    assert sources["network.latency"].startswith("not measured, as cpu")
