"""Rules on data ranks: every gradient is summed over the data ranks once, with those of its rank.

Which parameters there are is read off the operators, and where they are off the stages. What
several ranks hold is summed over all data ranks of all of them (`tensors.py`). That a bucket is
summed after the last backward of its stages is a rule of `computes.py`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from parcompiler.lower.lowered import Bucket
from parcompiler.schedules.action import NOWHERE
from parcompiler.verifier.fault import Fault
from parcompiler.verifier.tensors import ranks
from parcompiler.verifier.wiring import Wiring

AVERAGED = "every gradient is averaged over the data ranks"


def faults(wiring: Wiring) -> Iterator[Fault]:
    """All faults of what data ranks sum."""
    if wiring.lowered.data == 1:
        for item in wiring.lowered.buckets:
            yield Fault(AVERAGED, f"there is one data rank, and {item.label} sums over several")
        return
    found: dict[str, list[Bucket]] = defaultdict(list)
    for item in wiring.lowered.buckets:
        yield from _formed(wiring, item)
        for name in item.names:
            found[name].append(item)
    for name in _trained(wiring):
        yield from (_in_rows if name in wiring.rows else _summed)(wiring, name, found[name])
    for label, count in Counter(item.label for item in wiring.lowered.sums).items():
        if count > 1:
            yield Fault(AVERAGED, f"{count} sums have the label {label}")


def _trained(wiring: Wiring) -> Iterator[str]:
    """The parameters that get a gradient: trainable ones that some operator reads."""
    for item in wiring.graph.parameters:
        if item.trainable and wiring.is_read(item):
            yield item.name


def _summed(wiring: Wiring, name: str, buckets: list[Bucket]) -> Iterator[Fault]:
    """A parameter that one rank holds is in one bucket of that rank; others are in none."""
    holders = wiring.ranks_of(name)
    listed = ", ".join(item.label for item in buckets)
    if len(holders) > 1:
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


def _in_rows(wiring: Wiring, name: str, buckets: list[Bucket]) -> Iterator[Fault]:
    """Rows of a parameter that all ranks share are in one bucket of each rank."""
    counts = Counter(item.ranks for item in buckets)
    for rank in range(wiring.lowered.size):
        count = counts.pop((rank,), 0)
        if count != 1:
            times = f"{count} times" if count else "in no bucket"
            yield Fault(AVERAGED, f"the rows of {name} on rank {rank} are summed {times}")
    for held in counts:
        yield Fault(AVERAGED, f"all ranks hold rows of {name}, and it is summed on {ranks(held)}")


def _formed(wiring: Wiring, item: Bucket) -> Iterator[Fault]:
    """A bucket has parameters that are trained, all of one dtype."""
    if not item.names:
        yield Fault(AVERAGED, f"{item.label} is empty")
    known = {name: wiring.graph.by_name.get(name) for name in item.names}
    for name, parameter in known.items():
        if parameter is None or not parameter.trainable:
            kind = "the model does not have" if parameter is None else "is not trained"
            yield Fault(AVERAGED, f"{item.label} sums gradients of {name}, which {kind}")
    for name, count in Counter(item.names).items():
        if count > 1:
            yield Fault(AVERAGED, f"{item.label} has {name} {count} times")
    if item.stage != NOWHERE and (wiring.rank_of(item.stage),) != item.ranks:
        detail = f"{item.label} waits for stage {item.stage}, which is not on {ranks(item.ranks)}"
        yield Fault(AVERAGED, detail)
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in known.values() if p is not None})
    if len(dtypes) > 1:
        yield Fault(AVERAGED, f"{item.label} has gradients of several dtypes ({', '.join(dtypes)})")
