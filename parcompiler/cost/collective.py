"""What a collective takes: rings and trees of messages over the links within and between nodes.

    ring    0 -> 1 -> 2 -> 3 -> 0     n - 1 steps, each a piece of the bytes from every rank
    tree    0 <- 1, 2 <- 3; 0 <- 2    as many steps as the ranks halve, pipelined over the bytes

The algorithms are those of NCCL, and the cheaper is taken: the ring of Patarasuk and Yuan (2009,
section 3), the double binary tree of Sanders, Speck and Träff (2009; NCCL 2.4), and for pieces that
are gathered or scattered the tree of NCCL 2.23 ("PAT"). Over several nodes there is another way:
within each node first, then between ranks of the same place, each with an adapter of its own.

>>> from parcompiler.device import device
>>> eight, two = RankGroup(8), RankGroup(8, nodes=2)
>>> h100 = device("h100")
>>> seconds("all-reduce", 2**30, eight, h100) < seconds("all-reduce", 2**30, two, h100)
True
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from parcompiler.device import Device, Link
from parcompiler.mesh import Mesh
from parcompiler.spmd.conversions import BYTES

SENT: Mapping[str, Callable[[float, int], float]] = {str(name): f for name, f in BYTES.items()}
TWICE = ("all-reduce",)  # goes round twice: to the sum, and with it
ROOTED = ("broadcast", "reduce")  # one rank has or gets the whole: it is sent on


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Ranks that talk to each other: `size` of them on `nodes` nodes."""

    size: int
    nodes: int = 1

    @property
    def local(self) -> int:
        """The ranks on the node that has most of them."""
        return math.ceil(self.size / self.nodes)


def group(ranks: Iterable[int], device: Device) -> RankGroup:
    """The group of some ranks of a mesh of such devices.

    >>> from parcompiler.device import device
    >>> group(range(0, 32, 4), device("h100"))
    RankGroup(size=8, nodes=4)
    """
    members = list(ranks)
    return RankGroup(len(members), len({rank // device.devices_per_node for rank in members}))


def neighbours(size: int, device: Device) -> RankGroup:
    """Ranks whose numbers follow one another from the first of a node: those of a tensor axis."""
    return group(range(size), device)


def among(mesh: Mesh, ranks: Iterable[int]) -> RankGroup:
    """The group of some ranks of a mesh. A node has devices of one kind.

    >>> among(Mesh(pipeline=3, device=("h100", "h100", "l40s")), range(3))
    RankGroup(size=3, nodes=2)
    """
    members = list(ranks)
    if mesh.is_uniform:
        return group(members, mesh.hardware)
    devices, copies, starts = mesh.devices, mesh.grid.copies, _starts(mesh)
    places = ((rank, rank // copies) for rank in members)
    nodes = {
        (starts[r], (rank - starts[r] * copies) // devices[r].devices_per_node)
        for rank, r in places
    }
    return RankGroup(len(members), len(nodes))


def _starts(mesh: Mesh) -> list[int]:
    """For each pipeline coordinate the first of the run of equal devices that it is in: with it a
    node begins."""
    if mesh.is_uniform:
        return [0] * mesh.pipeline
    starts = [0]
    for r, (before, device) in enumerate(pairwise(mesh.devices), 1):
        starts.append(starts[-1] if device == before else r)
    return starts


def joined(mesh: Mesh, action: str, nbytes: float, ranks: Iterable[int]) -> float:
    """The time in s of a collective among ranks of a mesh; of several devices the slowest's."""
    members = list(ranks)
    together = among(mesh, members)
    if mesh.is_uniform:
        return seconds(action, nbytes, together, mesh.hardware)
    devices = {mesh.devices[r] for r in {rank // mesh.grid.copies for rank in members}}
    return max(seconds(action, nbytes, together, device) for device in devices)


def between(mesh: Mesh, source: int, target: int) -> Link:
    """The link between two pipeline coordinates: the slowest, where replicas use several.

    Different devices are on different nodes, and the slower of their two networks counts.

    >>> mesh = Mesh(pipeline=16, device="h100")
    >>> between(mesh, 6, 7).bandwidth, between(mesh, 7, 8).bandwidth
    (450000000000.0, 50000000000.0)
    """
    starts, copies = _starts(mesh), mesh.grid.copies
    one, other = (
        (mesh.hardware,) * 2 if mesh.is_uniform else (mesh.devices[source], mesh.devices[target])
    )
    if starts[source] != starts[target]:
        return _slowest_of((one.network, other.network))
    first, size = starts[source], one.devices_per_node
    crosses = any(
        ((source - first) * copies + k) // size != ((target - first) * copies + k) // size
        for k in range(min(copies, size))
    )
    return one.network if crosses else one.link


def _slowest_of(links: Iterable[Link]) -> Link:
    """A link as slow as the slowest of some in both."""
    distinct = set(links)
    if len(distinct) == 1:
        return distinct.pop()
    return Link(min(link.bandwidth for link in distinct), max(link.latency for link in distinct))


def slowest(mesh: Mesh) -> Link:
    """The slowest link between neighbours of the pipeline."""
    pairs = mesh.pipeline - 1
    if not mesh.is_uniform:
        return _slowest_of(between(mesh, r, r + 1) for r in range(pairs))
    device = mesh.hardware  # nodes repeat
    links = {between(mesh, r, r + 1) for r in range(min(pairs, device.devices_per_node))}
    return device.network if device.network in links else device.link


def message(mesh: Mesh, pairs: Iterable[tuple[int, int]], nbytes: float) -> float:
    """The time in s of a message between pipeline coordinates; of several the longest."""
    if mesh.is_uniform:
        links = {between(mesh, *pair) for pair in pairs} or {mesh.hardware.link}
        return max(carried(link, nbytes, mesh.hardware) for link in links)
    ways = [(between(mesh, *pair), mesh.devices[pair[0]]) for pair in pairs]
    return max(
        (
            carried(link, nbytes, device) if link is device.link else link.seconds(nbytes)
            for link, device in ways
        ),
        default=0.0,
    )


def carried(link: Link, nbytes: float, device: Device) -> float:
    """The time in s of a message on one of a device's links.

    Within a node as much of the bandwidth is reached as the device's curve of a "message" says.
    """
    if link is device.network:
        return link.seconds(nbytes)
    return link.seconds(nbytes / device.efficiency.exchange("message", nbytes))


def whole(action: str, sent: float, n: int) -> float:
    """The bytes of the value that a collective is about, of which each of `n` ranks sends some."""
    return sent / SENT[action](1.0, n)


def seconds(action: str, nbytes: float, ranks: RankGroup, device: Device) -> float:
    """The time in s of a collective about `nbytes` (of the whole value) among some ranks.

    `action` is "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast" or "reduce"
    (to one rank). Where the device has a measured curve of it that says which part of the
    bandwidth is reached.
    """
    if ranks.size < 2:
        return 0.0
    sent = _sent(action, nbytes, ranks.size)
    reached = device.efficiency.exchange(action, sent)
    if device.efficiency.measured(action) and ranks.nodes == 1:
        return device.link.seconds(sent / reached)
    inside = Link(device.link.bandwidth * reached, device.link.latency)
    outside = Link(device.network.bandwidth * reached, device.network.latency)
    if action == "all-to-all":
        return _direct(nbytes, ranks, inside, outside)
    ways = [
        _ring(action, sent, ranks, inside, outside),
        _tree(action, nbytes if action in TWICE else sent, ranks, inside, outside),
    ]
    if ranks.nodes > 1 and ranks.local > 1 and action not in ROOTED:
        ways.append(_levels(action, nbytes, ranks, inside, outside))
    return min(ways)


def _sent(action: str, nbytes: float, n: int) -> float:
    """Bytes that each rank sends in a ring."""
    return nbytes if action in ROOTED else SENT[action](nbytes, n)


def _bandwidth(ranks: RankGroup, inside: Link, outside: Link) -> float:
    """What goes round: between nodes a ring for the adapter of each rank of the node."""
    if ranks.nodes == 1:
        return inside.bandwidth
    return min(inside.bandwidth, ranks.local * outside.bandwidth)


def _ring(action: str, sent: float, ranks: RankGroup, inside: Link, outside: Link) -> float:
    """n - 1 steps, or twice as many; as many of them between nodes as nodes are left."""
    ways = 2 if action in TWICE else 1
    crossing = ranks.nodes - 1
    latency = (ranks.size - 1 - crossing) * inside.latency + crossing * outside.latency
    return ways * latency + sent / _bandwidth(ranks, inside, outside)


def _tree(action: str, nbytes: float, ranks: RankGroup, inside: Link, outside: Link) -> float:
    """Up, down or both, in pieces that follow one another, over a tree of the nodes' trees."""
    ways = 2 if action in TWICE else 1
    latency = math.ceil(math.log2(ranks.local)) * inside.latency
    latency += math.ceil(math.log2(ranks.nodes)) * outside.latency
    return ways * (latency + nbytes / _bandwidth(ranks, inside, outside))


def _levels(action: str, nbytes: float, ranks: RankGroup, inside: Link, outside: Link) -> float:
    """Within each node, and between nodes the pieces that the ranks of a node have."""
    ways, m = 2 if action in TWICE else 1, ranks.local
    within = (m - 1) * inside.latency + nbytes * (m - 1) / m / inside.bandwidth
    rest = _sent(action, nbytes / m, ranks.nodes) / outside.bandwidth
    return ways * (within + (ranks.nodes - 1) * outside.latency) + rest


def _direct(nbytes: float, ranks: RankGroup, inside: Link, outside: Link) -> float:
    """Every rank sends each other its piece, all at once."""
    piece = nbytes / ranks.size**2
    near, far = (ranks.local - 1) * piece, (ranks.size - ranks.local) * piece
    slow = outside.seconds(far) if far else 0.0
    return max(inside.seconds(near), slow)
