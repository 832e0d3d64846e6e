"""Makes a case that fails smaller while it fails in the same way.

Statements go, one at a time: what reads their values reads instead one of the values that they were
made of, or goes too. Options, ranks, micro-batches and steps go. What is no model any more, or
fails in another way, is not taken.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator

from tests.random_models.generator import Body, Case, Statement, names_in, renamed, used

MOST = 250  # candidates that are tried


def reduced(case: Case, fails: Callable[[Case], bool]) -> Case:
    """The smallest case that `fails`, as far as a greedy search finds it."""
    left = MOST
    smaller = True
    while smaller and left > 0:
        smaller = False
        for candidate in _smaller(case):
            left -= 1
            if fails(candidate):
                case, smaller = candidate, True
                break
            if left == 0:
                break
    return case


def _smaller(case: Case) -> Iterator[Case]:
    """Cases with a little less, in the order in which to try them."""
    yield from _plainer(case)  # first: on one rank all that follows is quicker
    yield from _fewer_statements(case)
    read = set().union(*(s.reads for s in case.bodies[-1].statements), names_in(_returns(case)))
    for name in case.inputs:
        if name not in read:
            yield _with_inputs(case, {k: v for k, v in case.inputs.items() if k != name})


def _returns(case: Case) -> str:
    """What the model returns."""
    return case.bodies[-1].returns


def _with_inputs(case: Case, inputs: dict[str, tuple[object, ...]]) -> Case:
    """The case with fewer inputs."""
    model = dataclasses.replace(case.bodies[-1], takes=tuple(inputs))
    return dataclasses.replace(case, inputs=inputs, bodies=(*case.bodies[:-1], model))


def _plainer(case: Case) -> Iterator[Case]:
    """Cases with fewer options, ranks, micro-batches, steps."""
    for axis, degree in case.mesh.items():
        mesh = {k: v for k, v in case.mesh.items() if k != axis}
        yield dataclasses.replace(case, mesh=mesh)
        if degree > 2:
            yield dataclasses.replace(case, mesh=mesh | {axis: 2})
    for key, value in case.options.items():
        if key != "microbatches":
            options = {k: v for k, v in case.options.items() if k != key}
            yield dataclasses.replace(case, options=options)
        elif value > 1:
            for count in {1, value - 1}:
                options = case.options | {"microbatches": count}
                yield dataclasses.replace(case, options=options)
    plain = {"optimizer": "SGD", "options": {"lr": 0.05}, "max_norm": None, "steps": 1}
    for key, value in (plain | {"loads": False}).items():
        if case.training[key] != value:
            yield dataclasses.replace(case, training=case.training | {key: value})
    if case.positional:
        yield dataclasses.replace(case, positional=False)
    if case.evaluating:
        yield dataclasses.replace(case, evaluating=False)
    if case.dtype == "float32" and "precision" not in case.options:
        yield dataclasses.replace(case, dtype="float64")


def _fewer_statements(case: Case) -> Iterator[Case]:
    """Cases with a statement less, the last ones first."""
    for position in reversed(range(len(case.bodies))):
        body = case.bodies[position]
        for number in reversed(range(len(body.statements))):
            for smaller in _without(body, number):
                bodies = [*case.bodies[:position], smaller, *case.bodies[position + 1 :]]
                yield dataclasses.replace(case, bodies=used(bodies))
        if body.returns.startswith("{"):
            bodies = [*case.bodies[:position], dataclasses.replace(body, returns="loss")]
            yield dataclasses.replace(case, bodies=tuple(bodies))


def _without(body: Body, number: int) -> Iterator[Body]:
    """A body without one of its statements, or with a shorter list of layers."""
    gone = body.statements[number]
    text = "\n".join(gone.init)
    for layers in re.findall(r"range\((\d)\)", text):
        if int(layers) > 1:
            init = (text.replace(f"range({layers})", f"range({int(layers) - 1})"),)
            shorter = dataclasses.replace(gone, init=init)
            yield _with(body, [*body.statements[:number], shorter, *body.statements[number + 1 :]])
    rest = [*body.statements[:number], *body.statements[number + 1 :]]
    kept = _independent(rest, set(gone.targets))
    if not names_in(body.returns) & _lost(rest, kept, gone):
        yield _with(body, kept)
    for other in sorted(gone.reads - {"loss"}) if gone.targets != ("loss",) else ():
        names = dict.fromkeys(gone.targets, other)
        later = [s.renamed(names) for s in body.statements[number + 1 :]]
        returns = renamed(body.returns, names)
        yield dataclasses.replace(
            body, statements=(*body.statements[:number], *later), returns=returns
        )


def _with(body: Body, statements: list[Statement]) -> Body:
    """A body of other statements."""
    return dataclasses.replace(body, statements=tuple(statements))


def _independent(statements: list[Statement], lost: set[str]) -> list[Statement]:
    """The statements that do without the `lost` values, and without what is lost by that."""
    kept, lost = [], set(lost) - {"loss"}
    for statement in statements:
        if statement.reads & lost:
            lost |= {name for name in statement.targets if name != "loss"}
        else:
            kept.append(statement)
    return kept


def _lost(rest: list[Statement], kept: list[Statement], gone: Statement) -> set[str]:
    """The variables that are not made any more."""
    made = {name for s in kept for name in s.targets}
    return {name for s in (*rest, gone) for name in s.targets} - made
