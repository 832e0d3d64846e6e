"""Whether the numbers of a plan can be meant: plans are edited by hand.

`compile(plan=...)` says what of a plan does not fit a model; here is what fits no model at all.

>>> from parcompiler.plan import Shape
>>> check(Plan("GPT", "0f", Shape(pipeline=0), 8))
Traceback (most recent call last):
    ...
parcompiler.errors.InputError: plan.mesh.pipeline must be at least 1 (0 found)
"""

from __future__ import annotations

from collections.abc import Iterator

from parcompiler.errors import InputError
from parcompiler.plan import Plan
from parcompiler.schedules import Schedule


def check(plan: Plan) -> None:
    """Raise InputError that names the first field that makes no sense, and what was expected."""
    for message in _faults(plan):
        raise InputError(message)


def _faults(plan: Plan) -> Iterator[str]:
    """What is wrong, field by field."""
    for axis in ("pipeline", "tensor", "data"):
        yield from _least(f"mesh.{axis}", getattr(plan.mesh, axis), 1)
    yield from _least("microbatches", plan.microbatches, 1)
    yield from _least("virtual_stages", plan.virtual_stages, 1)
    if plan.granularity is not None:
        yield from _least("granularity", plan.granularity, 0)
    yield from _stages(plan)
    yield from _orders(plan)


def _least(name: str, value: int, least: int) -> Iterator[str]:
    if value < least:
        yield f"plan.{name} must be at least {least} ({value} found)"


def _orders(plan: Plan) -> Iterator[str]:
    """Cells that are none, or rows for ranks that are not there."""
    if plan.orders is None:
        return
    if len(plan.orders) != plan.mesh.pipeline:
        wanted = f"a row for each of {plan.mesh.pipeline} pipeline ranks"
        yield f"plan.orders must have {wanted} ({len(plan.orders)} found)"
    try:
        Schedule.parse(plan.schedule or "", plan.orders)
    except InputError as error:
        yield f"plan.orders: {error}"


def _stages(plan: Plan) -> Iterator[str]:
    """Stages on ranks that are not there, without blocks, or with a block of another."""
    last, seen = plan.mesh.pipeline - 1, set[str]()
    for j, stage in enumerate(plan.stages or ()):
        place = f"plan.stages[{j}]"
        if not 0 <= stage.rank <= last:
            wanted = f"from 0 to {last}, as mesh.pipeline says"
            yield f"{place}.rank must be {wanted} ({stage.rank} found)"
        if not stage.blocks:
            yield f"{place}.blocks must name at least one block (none found)"
        for name in stage.blocks:
            if name in seen:
                yield f"{place}.blocks names {name!r}, which stands in the stages already"
            seen.add(name)
