"""A bound of the seconds of a step that knows the schedules: even stages under each, and memory.

    problem of a candidate ── vocabulary x schedule ──► even stages, and what memory makes them
                                                        recompute                 passes.even
    the same with tensor ranks as one device ──► before it is known what they exchange

The schedule pass takes even stages for the best under every schedule that is known by name, and so
does this, for blocks of every granularity.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from parcompiler.device import Device, Link
from parcompiler.errors import InputError, PlanError
from parcompiler.mesh import Mesh
from parcompiler.meshes.bounds import ROUNDING
from parcompiler.passes.decide import start
from parcompiler.passes.even import even_bound
from parcompiler.passes.schedule import CANDIDATES, candidates_for
from parcompiler.passes.shard import ShardPass
from parcompiler.passes.shard.local import local
from parcompiler.passes.vocabulary import choices_for
from parcompiler.plan import Plan, VocabularyChoice
from parcompiler.problem import Problem


def is_known(problem: Problem) -> bool:
    """Whether the schedules in question are those of which even stages are the best."""
    return problem.options.schedule in ("auto", *CANDIDATES)


def even_seconds(problem: Problem) -> float:
    """Seconds of a step with even stages under the best schedule and way with the vocabulary.

    Infinite where blocks fit on no ranks even if they could be cut anywhere; 0 where an option is
    wrong: the passes will say so.
    """
    try:
        steps = [even_bound(own, plan) for own, plan in _trials(problem)]
    except (PlanError, InputError):
        return 0.0
    return min(steps, default=0.0) * ROUNDING


def as_one(problem: Problem) -> Problem:
    """The problem on a mesh where the tensor ranks of each line are one device, as fast and as
    large as all of them: nothing is exchanged there."""
    mesh = problem.mesh
    device = _together(problem.device, mesh.tensor)
    return problem.anew(mesh=Mesh(mesh.pipeline, 1, mesh.data, device))


def _together(device: Device, count: int) -> Device:
    """So many devices as one."""

    def wider(link: Link) -> Link:
        return dataclasses.replace(link, bandwidth=link.bandwidth * count)

    return dataclasses.replace(
        device,
        flops=tuple((dtype, peak * count) for dtype, peak in device.flops),
        memory_bandwidth=device.memory_bandwidth * count,
        memory=device.memory * count,
        link=wider(device.link),
        network=wider(device.network),
        devices_per_node=max(1, device.devices_per_node // count),
    )


def _trials(problem: Problem) -> Iterator[tuple[Problem, Plan]]:
    """The problem of a rank under each schedule and way with the vocabulary."""
    choices: list[VocabularyChoice | None]
    choices = [*choices_for(problem)] if problem.mesh.pipeline > 1 else [None]
    for choice in choices:
        trial = dataclasses.replace(start(problem), vocabulary=choice)
        trial = ShardPass().run(local(problem, trial), trial)
        own = local(problem, trial)
        for plan in candidates_for(own, trial):
            yield own, plan
