"""Rules on parameters and buffers: one gradient for each, and updates in place where they belong.

A parameter that several ranks hold stays the same on all of them only if its gradients are summed
over exactly those ranks; if every backward is followed by an update there is no such sum, and only
one stage may hold it. Memory that is updated in place cannot be shared by two ranks at all.

The parameters that data ranks sum are derived from the operators, and their places from the stages.
That a bucket is summed after the last backward of its stages is a rule of `compute.py`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

from torch import fx

from parcompiler.graph import Parameter
from parcompiler.instruction import EXPERTS
from parcompiler.lower.lowered import Bucket, StageProgram, TiedTensor
from parcompiler.schedules.action import NOWHERE
from parcompiler.verifier.fault import Fault, ranks, repeated
from parcompiler.verifier.wiring import Wiring

HELD = "every tensor is on a stage that reads it"
SUMMED = "every parameter has one gradient"
ALONE = "an asynchronous step updates every parameter on one stage"
IN_PLACE = "what is updated in place stays on one stage"
IN_ORDER = "updates in place keep their order"
AVERAGED = "every gradient is averaged over the data ranks"

EVERY = -2  # the home of nodes that every stage computes for itself; NOWHERE: all ranks


def faults(wiring: Wiring) -> Iterator[Fault]:
    """All faults of parameters, buffers and updates in place."""
    for j, stage in enumerate(wiring.stages):
        yield from _reads(wiring, j, stage)
    tied: dict[str, list[TiedTensor]] = {}
    for item in wiring.lowered.tied:
        tied.setdefault(item.name, []).append(item)
    for parameter in wiring.graph.parameters:
        yield from _holders(wiring, parameter)
        if parameter.trainable:
            yield from _sum(wiring, parameter, tied.get(parameter.name, []))
    yield from _ties(wiring)
    for root, writers in wiring.effects.writers.items():
        yield from _UpdatedMemory(wiring, root, writers).faults()
    yield from _data_sums(wiring)


def _reads(wiring: Wiring, j: int, stage: StageProgram) -> Iterator[Fault]:
    """A stage holds the tensors that its nodes read, and no unknown ones."""
    nodes = [*stage.prologue, *(node for call in stage.calls for node in call.block.nodes)]
    operands = (wiring.tensor(operand) for node in nodes for operand in node.all_input_nodes)
    tensors = set(stage.tensors)
    for name in dict.fromkeys(item.name for item in operands if item is not None):
        if name not in tensors:
            yield Fault(HELD, f"stage {j} reads {name} and does not hold it")
    for name, count in Counter(stage.tensors).items():
        if count > 1:
            yield Fault(HELD, f"stage {j} holds {name} {count} times")
        if name not in wiring.graph.by_name:
            yield Fault(HELD, f"stage {j} holds {name}, which the model does not have")


def _holders(wiring: Wiring, item: Parameter) -> Iterator[Fault]:
    """A tensor is somewhere, and on one stage only when the forward updates it."""
    holders = wiring.holders.get(item.name, ())
    listed = ", ".join(map(str, holders))
    if not holders and item.name not in wiring.rows:
        yield Fault(HELD, f"no stage holds {item.name}")
    if holders and item.name in wiring.rows:
        yield Fault(HELD, f"{item.name} is on stages {listed}, and all ranks hold rows of it")
    if wiring.lowered.asynchronous and item.trainable and len(holders) > 1:
        advice = "untie them or take a synchronous schedule"
        detail = f"{item.name} is on stages {listed}, and its copies would drift apart ({advice})"
        yield Fault(ALONE, detail)
    if item.mutated and len(holders) > 1:
        yield Fault(IN_PLACE, f"{item.name} is on stages {listed}, and each would update its own")


def _sum(wiring: Wiring, item: Parameter, tied: list[TiedTensor]) -> Iterator[Fault]:
    """The gradients of a parameter are summed once, over the ranks that hold it."""
    holders = wiring.ranks_of(item.name)
    if len(holders) > 1 and not tied:
        yield Fault(SUMMED, f"{item.name} is on {ranks(holders)}, and nothing sums its gradients")
    for entry in tied:
        if tuple(sorted(entry.ranks)) != holders or len(holders) < 2:
            where = f"{item.name} is on {ranks(holders)}"
            yield Fault(SUMMED, f"{where}, and {entry.label} sums over {ranks(entry.ranks)}")
    if len(tied) > 1:
        listed = ", ".join(entry.label for entry in tied)
        yield Fault(SUMMED, f"{item.name} is summed {len(tied)} times ({listed})")


def _ties(wiring: Wiring) -> Iterator[Fault]:
    """Every sum is of a trained parameter, under a unique label."""
    for item in wiring.lowered.tied:
        yield from _untrained(wiring, item, SUMMED)
    for label, count in repeated(item.label for item in wiring.lowered.tied):
        yield Fault(SUMMED, f"{count} parameters have the label {label}")


def _untrained(wiring: Wiring, item: TiedTensor | Bucket, rule: str) -> Iterator[Fault]:
    """A sum is of trained parameters."""
    for name in dict.fromkeys(item.names):
        parameter = wiring.graph.by_name.get(name)
        if parameter is None or not parameter.trainable:
            kind = "the model does not have" if parameter is None else "is not trained"
            yield Fault(rule, f"{item.label} sums gradients of {name}, which {kind}")


class _UpdatedMemory:
    """The rules on memory that some node updates in place. `root` is the node that made it.

    `members` write it, or share it before the last update; `readers` use it; `homes` are the stages
    that run them.
    """

    def __init__(self, wiring: Wiring, root: fx.Node, writers: list[fx.Node]) -> None:
        self.wiring = wiring
        self.root = root
        self.position = wiring.position
        views = wiring.views[root]
        self.writers = set(writers)
        self.last = max(self.position[node] for node in writers)
        last = self.last if root.op != "placeholder" else len(self.position)
        nodes = (node for node in (*views, *writers) if node.op == "call_function")
        self.members = {node for node in nodes if self.position[node] <= last}
        self.readers = {u for node in views for u in node.users if u.op == "call_function"}
        self.homes: dict[fx.Node, int] = {}
        for node in self.members | self.readers:
            if node in wiring.homes:
                self.homes[node] = wiring.homes[node][0][0]
            elif node in wiring.recomputed:
                self.homes[node] = EVERY
            elif node in wiring.everywhere:
                self.homes[node] = NOWHERE

    def faults(self) -> Iterator[Fault]:
        """All faults of this memory."""
        places = {self.homes[node] for node in self.members if node in self.homes}
        if len(places) > 1:
            listed = " and ".join(map(_place, sorted(places)))
            yield Fault(IN_PLACE, f"{self._name()} is updated and shared by {listed}")
        elif places:
            yield from self._strangers(places.pop())
            for j, stage in enumerate(self.wiring.stages):
                yield from self._order(j, stage)

    def _name(self) -> str:
        """The name of this memory for a user."""
        tensor = self.wiring.tensor(self.root)
        return self.root.name if tensor is None else tensor.name

    def _strangers(self, place: int) -> Iterator[Fault]:
        """Other stages read the memory only after the last update, and never a buffer's."""
        for node in sorted(self.readers - self.members, key=self.position.__getitem__):
            home = self.homes.get(node, place)
            early = self.root.op == "placeholder" or self.position[node] < self.last
            if home != place and early:
                detail = f"{_place(place)} updates {self._name()}, and {_place(home)} reads it"
                yield Fault(IN_PLACE, f"{detail} ({node.name})")

    def _order(self, j: int, stage: StageProgram) -> Iterator[Fault]:
        """On a stage, updates and reads of the memory are in the model's order."""
        latest = latest_update = -1
        run = [*stage.prologue, *(node for call in stage.calls for node in call.block.nodes)]
        for node in run:
            if node in self.homes:
                position = self.position[node]
                if position < (latest if node in self.writers else latest_update):
                    detail = f"stage {j} runs {node.name} too late (it touches {self._name()})"
                    yield Fault(IN_ORDER, detail)
                latest = max(latest, position)
                if node in self.writers:
                    latest_update = max(latest_update, position)


def _place(home: int) -> str:
    """The home of a node in words.

    >>> _place(2), _place(EVERY), _place(NOWHERE)
    ('stage 2', 'the prologue', 'all ranks')
    """
    return {EVERY: "the prologue", NOWHERE: "all ranks"}.get(home, f"stage {home}")


def _data_sums(wiring: Wiring) -> Iterator[Fault]:
    """Every gradient is summed over the data ranks once, in a bucket of its rank."""
    if wiring.lowered.data == 1:
        for item in wiring.lowered.buckets:
            yield Fault(AVERAGED, f"there is one data rank, and {item.label} sums over several")
        return
    buckets: dict[str, list[Bucket]] = defaultdict(list)
    for item in wiring.lowered.buckets:
        yield from _formed(wiring, item)
        for name in item.names:
            buckets[name].append(item)
    read = {operand.name for node in wiring.position for operand in node.all_input_nodes}
    for parameter in wiring.graph.parameters:
        if parameter.trainable and parameter.node in read:
            name = parameter.name
            if name in wiring.rows:
                where, every = f"all ranks hold rows of {name}", range(wiring.lowered.size)
                yield from _on_each(where, "rows", name, buckets[name], every)
            else:
                yield from _in_bucket(wiring, name, buckets[name])
    for label, count in repeated(item.label for item in wiring.lowered.sums):
        yield Fault(AVERAGED, f"{count} sums have the label {label}")


def _in_bucket(wiring: Wiring, name: str, buckets: list[Bucket]) -> Iterator[Fault]:
    """A parameter that one rank holds is in one bucket of that rank; others are in none, or in one
    of each of their ranks where data ranks keep pieces of gradients."""
    holders, lowered = wiring.ranks_of(name), wiring.lowered
    experts, alone = wiring.graph.by_name[name].experts, lowered.data == lowered.expert
    listed = ", ".join(item.label for item in buckets)
    if len(holders) > 1 and lowered.zero > 1:
        yield from _on_each(f"{name} is on {ranks(holders)}", "gradients", name, buckets, holders)
        return
    if len(holders) > 1 or (experts and alone):
        if buckets:
            yield Fault(AVERAGED, f"{name} is on {ranks(holders)}, and also in {listed}")
        return
    if not buckets:
        yield Fault(AVERAGED, f"{name} is in no bucket of {ranks(holders)}")
    if len(buckets) > 1:
        yield Fault(AVERAGED, f"{name} is summed {len(buckets)} times ({listed})")
    for item in buckets:
        if item.ranks != holders:
            detail = f"{name} is on {ranks(holders)}, and {item.label} is of {ranks(item.ranks)}"
            yield Fault(AVERAGED, detail)


def _on_each(
    where: str, kind: str, name: str, buckets: list[Bucket], holders: Iterable[int]
) -> Iterator[Fault]:
    """A tensor that several ranks hold is in one bucket of each."""
    counts = Counter(item.ranks for item in buckets)
    for rank in holders:
        count = counts.pop((rank,), 0)
        if count != 1:
            times = f"{count} times" if count else "in no bucket"
            yield Fault(AVERAGED, f"the {kind} of {name} on rank {rank} are summed {times}")
    for others in counts:
        yield Fault(AVERAGED, f"{where}, and it is summed on {ranks(others)}")


def _formed(wiring: Wiring, item: Bucket) -> Iterator[Fault]:
    """A bucket has trained parameters of one dtype, all of experts or none."""
    if not item.names:
        yield Fault(AVERAGED, f"{item.label} is empty")
    yield from _untrained(wiring, item, AVERAGED)
    for name, count in repeated(item.names):
        yield Fault(AVERAGED, f"{item.label} has {name} {count} times")
    if item.stage != NOWHERE and (wiring.rank_of(item.stage),) != item.ranks:
        detail = f"{item.label} waits for stage {item.stage}, which is not on {ranks(item.ranks)}"
        yield Fault(AVERAGED, detail)
    by_name = wiring.graph.by_name
    known = [by_name[name] for name in item.names if name in by_name]
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in known})
    if len(dtypes) > 1:
        yield Fault(AVERAGED, f"{item.label} has gradients of several dtypes ({', '.join(dtypes)})")
    kinds = {bool(p.experts) for p in known}
    if kinds - {item.label.startswith(EXPERTS)}:
        which = "those with its experts" if item.label.startswith(EXPERTS) else "all"
        yield Fault(AVERAGED, f"{item.label} is of {which} of the data ranks, and has others' too")
