"""Seconds of a collective: rings and trees of messages over the links within and between nodes.

    ring    0 -> 1 -> 2 -> 3 -> 0     n - 1 steps, each a piece of the bytes from every rank
    tree    0 <- 1, 2 <- 3; 0 <- 2    log2(n) steps, pipelined over the bytes

On accelerators the algorithms and their figures are those by which NCCL chooses (NVIDIA/nccl,
src/graph/tuning.cc, ncclTopoTuneModel and its table of constants), and the cheapest is taken: the
ring of Patarasuk and Yuan (2009, section 3); for all-reduce also the double binary tree of Sanders,
Speck and Träff (2009); for all-gather and reduce-scatter among ranks alone on their nodes also a
tree ("PAT"). Each uses the cheapest of three protocols: few bytes go with flags among them, so that
no rank waits for fences, and many without. On CPUs (gloo) there is one protocol, and trees for all
but all-to-all.

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
from typing import Any, NamedTuple

from parcompiler.device import Device, Link
from parcompiler.mesh import Mesh
from parcompiler.spmd.conversions import BYTES

SENT: Mapping[str, Callable[[float, int], float]] = {str(name): f for name, f in BYTES.items()}
TWICE = ("all-reduce",)  # bytes go round twice: as summands, and as the sum
ROOTED = ("broadcast", "reduce")  # one rank has or gets the whole


@dataclass(frozen=True, slots=True)
class RankGroup:
    """A group of `size` ranks on `nodes` nodes."""

    size: int
    nodes: int = 1

    @property
    def local(self) -> int:
        """The number of ranks on the node that has most of them."""
        return math.ceil(self.size / self.nodes)


def group(ranks: Iterable[int], device: Device) -> RankGroup:
    """The group of some ranks of a mesh of such devices.

    >>> from parcompiler.device import device
    >>> group(range(0, 32, 4), device("h100"))
    RankGroup(size=8, nodes=4)
    """
    members = list(ranks)
    return RankGroup(len(members), len({rank // device.devices_per_node for rank in members}))


def neighbours(size: int, device: Device, apart: int = 1) -> RankGroup:
    """A group of `size` ranks whose numbers differ by `apart`, from the first of a node on; those
    of a tensor axis follow one another."""
    return group(range(0, size * apart, apart), device)


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
    """For each pipeline coordinate, the first of its run of equal devices, where a node begins."""
    if mesh.is_uniform:
        return [0] * mesh.pipeline
    starts = [0]
    for r, (before, device) in enumerate(pairwise(mesh.devices), 1):
        starts.append(starts[-1] if device == before else r)
    return starts


def joined(mesh: Mesh, action: str, nbytes: float, ranks: Iterable[int]) -> float:
    """Seconds of a collective among ranks of a mesh, on the slowest of their devices."""
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
    """A link with the least bandwidth and the largest latency of some links."""
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
    """Seconds of a message between pipeline coordinates; of several pairs the longest."""
    if mesh.is_uniform:
        links = {between(mesh, *pair) for pair in pairs} or {mesh.hardware.link}
        return max(carried(link, nbytes, mesh.hardware) for link in links)
    ways = [(between(mesh, *pair), mesh.devices[pair[0]]) for pair in pairs]
    return max((carried(link, nbytes, device) for link, device in ways), default=0.0)


def carried(link: Link, nbytes: float, device: Device) -> float:
    """Seconds of a message on the link of a device's node, or on one between nodes.

    The share of the bandwidth that is reached is that of the device's curves: within a node of a
    "message", else of the "link"; between nodes of the "network".
    """
    reached = device.efficiency.exchange
    if link is device.link:
        return link.seconds(nbytes / reached("message", nbytes, "link"))
    return link.seconds(nbytes / reached("network", nbytes))


def whole(action: str, sent: float, n: int) -> float:
    """Bytes of the whole value of a collective, from the bytes that each of `n` ranks sends."""
    return sent / SENT[action](1.0, n)


@dataclass(frozen=True, slots=True)
class Protocol:
    """A protocol that copies pieces. All pairs are for within and between nodes.

    `payload` is the share of data in the bytes sent. Latencies are shares of a link's latency: of
    the kernel once (`base`), of each step of a ring and of a tree. LL has flags of 4 B after every
    4 B, LL128 of 8 B after every 120 B; Simple waits. LL uses at most `most` of a link's nominal
    bandwidth.
    """

    payload: tuple[float, float] = (1.0, 1.0)
    tree_payload: tuple[float, float] = (1.0, 1.0)
    base: tuple[float, float] = (0.0, 0.0)
    ring: tuple[float, float] = (1.0, 1.0)
    tree: tuple[float, float] = (1.0, 1.0)
    most: tuple[float, float] = (math.inf, math.inf)


def _nccl(
    base: float, ring: tuple[float, float], tree: tuple[float, float], **more: Any
) -> Protocol:
    """A protocol from NCCL's microseconds, within and between nodes. A link's latency is that of a
    message by Simple: 8.4 for the kernel, plus a step of 3.4 within a node or 14 between nodes."""
    near, far = 8.4 + 3.4, 8.4 + 14.0
    return Protocol(
        base=(base / near, base / far),
        ring=(ring[0] / near, ring[1] / far),
        tree=(tree[0] / near, tree[1] / far),
        **more,
    )


# baseLatencies, hwLatencies (NVLINK and NET), llMaxBws of Ampere by 300 GB/s, and the refinements.
NCCL = (
    _nccl(
        6.6, (0.6, 2.7), (0.6, 5.0),
        payload=(0.5, 0.5), tree_payload=(0.92 / 3.8, 0.92 / 3.8), most=(0.29, 0.075),
    ),
    _nccl(
        14.0, (1.9, 4.0), (1.25, 8.5),
        payload=(0.92, 0.92), tree_payload=(0.92 * 7 / 9, 0.92 * 120 / 128),
    ),
    _nccl(8.4, (3.4, 14.0), (4.0, 14.0), tree_payload=(0.92, 0.92)),
)  # fmt: skip
GLOO = (Protocol(),)
PAT_PAYLOAD, PAT_STEP, PAT_RANK = 0.75, 14.0 / 3.5 / 22.4, 2.8 / 22.4  # of "PAT", as above


def seconds(action: str, nbytes: float, ranks: RankGroup, device: Device) -> float:
    """Seconds of a collective of `nbytes` (of the whole value) among some ranks.

    `action` is "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "rotation" (all round,
    see `ring`), "broadcast" or "reduce" (to one rank). The share of the bandwidth that is reached
    is that of the device's measured curve of the action, if there is one; else that of its "link"
    and its "network", for all collectives.
    """
    if ranks.size < 2:
        return 0.0
    sent = nbytes if action in ROOTED else SENT[action](nbytes, ranks.size)  # by a rank of a ring
    efficiency = device.efficiency
    if efficiency.measured(action) and ranks.nodes == 1:
        return device.link.seconds(sent / efficiency.exchange(action, sent))
    links = _Links(
        ranks,
        device.link.at(efficiency.exchange(action, sent, "link")),
        device.network.at(efficiency.exchange(action, sent, "network")),
        device.link.bandwidth,
    )
    if action == "all-to-all":
        return _direct(nbytes, links)
    if action == "rotation":  # messages to the next rank, each when the one before is there
        return (ranks.size - 1) * links.slowest.seconds(nbytes / ranks.size)
    ways = [_ring(action, sent, links, protocol) for protocol in _protocols(device)]
    if action in TWICE or device.is_cpu:
        about = nbytes if action in TWICE else sent
        ways += [_tree(action, about, links, protocol) for protocol in _protocols(device)]
    elif action not in ROOTED and ranks.local == 1:
        ways.append(_pat(sent, links))
    return min(ways)


def _protocols(device: Device) -> tuple[Protocol, ...]:
    return GLOO if device.is_cpu else NCCL


class _Links(NamedTuple):
    """The links between the ranks of a group; `nominal` is the nominal bandwidth of a link."""

    ranks: RankGroup
    inside: Link
    outside: Link
    nominal: float

    @property
    def several(self) -> int:
        """The index in pairs of figures: 0 within one node, 1 over several."""
        return int(self.ranks.nodes > 1)

    @property
    def slowest(self) -> Link:
        """The slowest link of a ring."""
        return self.outside if self.several else self.inside

    def bandwidth(self, payload: tuple[float, float], most: tuple[float, float]) -> float:
        """The bandwidth of all rings together: between nodes there is one for the adapter of each
        rank of a node."""
        reached = self.inside.bandwidth
        if self.several:
            reached = min(reached, self.ranks.local * self.outside.bandwidth)
        return min(reached * payload[self.several], most[self.several] * self.nominal)


def _ring(action: str, sent: float, links: _Links, protocol: Protocol) -> float:
    """Seconds of a ring: n - 1 steps, or twice that, of which nodes - 1 are between nodes."""
    ways, crossing = 2 if action in TWICE else 1, links.ranks.nodes - 1
    near, far = protocol.ring
    alone = protocol.tree[1] if links.ranks.local == 1 else far  # then nothing hides a step
    latency = (links.ranks.size - 1 - crossing) * near * links.inside.latency
    latency += crossing * alone * links.outside.latency
    once = protocol.base[links.several] * links.slowest.latency
    return once + ways * latency + sent / links.bandwidth(protocol.payload, protocol.most)


def _tree(action: str, nbytes: float, links: _Links, protocol: Protocol) -> float:
    """Seconds of a tree, up, down or both, with the bytes in pieces that follow one another. NCCL's
    is a tree of nodes, with a chain of ranks in each; gloo's halves the ranks of a node too."""
    ways, (near, far) = 2 if action in TWICE else 1, protocol.tree
    local, nodes = links.ranks.local, links.ranks.nodes
    steps = local - 1 if protocol in NCCL else math.ceil(math.log2(local))
    latency = steps * near * links.inside.latency
    latency += math.ceil(math.log2(nodes)) * far * links.outside.latency
    once = protocol.base[links.several] * links.slowest.latency
    carried = nbytes / links.bandwidth(protocol.tree_payload, protocol.most)
    return once + ways * (latency + carried)


def _pat(sent: float, links: _Links) -> float:
    """Seconds of PAT: pieces over a tree of ranks that are alone on their nodes."""
    steps = 8.0 / 22.4 + math.log2(links.ranks.nodes) * PAT_STEP + links.ranks.size * PAT_RANK
    return steps * links.outside.latency + sent / (links.outside.bandwidth * PAT_PAYLOAD)


def _direct(nbytes: float, links: _Links) -> float:
    """Seconds of an all-to-all: every rank sends each other rank its piece, all at once."""
    size, local = links.ranks.size, links.ranks.local
    piece = nbytes / size**2
    near, far = (local - 1) * piece, (size - local) * piece
    slow = links.outside.seconds(far) if far else 0.0
    return max(links.inside.seconds(near), slow)
