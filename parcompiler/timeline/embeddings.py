"""Places, in the orders of all ranks, of the embeddings that all ranks compute.

An embedding is looked up one micro-batch ahead of its user, and its gradient is added when it has
had time to arrive. With a head, the collectives of embeddings must not hold up those of the head,
for any seconds of the actions. So all ranks have them at the same S and T:

    EMBED e            before the last S that all ranks have begun by that moment
    EMBED_BACKWARD e   after the T of the first S on the user's rank after its backward

Without a head, all ranks have them at the same moments of a walk.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter

from parcompiler.instruction import BACKWARDS, Kind
from parcompiler.schedules.action import NOWHERE, Action
from parcompiler.timeline.collectives import SharedLayers, returned
from parcompiler.timeline.order import OrderWalk, Span, StageLink, walked

Moment = tuple[float, Action]  # the earliest time of an action

AFTER = 1  # time of the walk that a broadcast may take beside the compute


def whole_walk(
    placement: Sequence[int],
    orders: Sequence[Sequence[Action]],
    links: Sequence[StageLink],
    layers: SharedLayers | None = None,
    basis: OrderWalk | None = None,
) -> OrderWalk:
    """A walk through orders that contain the head of `layers`, with the embeddings inserted."""
    if layers is not None and layers.users:
        basis = walked(placement, orders, links, replace(layers, users=()), basis)
        orders = with_embeddings(placement, orders, basis.spans, layers)
    return walked(placement, orders, links, layers, basis)


def with_embeddings(
    placement: Sequence[int],
    orders: Sequence[Sequence[Action]],
    all_spans: Sequence[Sequence[Span]],
    layers: SharedLayers,
) -> Sequence[Sequence[Action]]:
    """The orders with EMBED and, in training, EMBED_BACKWARD on every rank. `all_spans` are start
    and end of each action without these."""
    spans = {
        action: span
        for order, spans_of in zip(orders, all_spans, strict=True)
        for action, span in zip(order, spans_of, strict=True)
        if action.stage != NOWHERE
    }
    lookups = sorted(_lookups(layers.users, spans), key=lambda item: item[0])
    if layers.source is None:
        gradients = _gradients(layers.users, spans)
        return inserted(orders, all_spans, sorted([*lookups, *gradients], key=lambda m: m[0]))
    front, first = _lookups_before(orders, all_spans, lookups)
    behind, tail = _gradients_after(placement, orders, layers)
    return [
        [*_anchored(order, spans_of, front, first, behind), *tail]
        for order, spans_of in zip(orders, all_spans, strict=True)
    ]


def inserted(
    orders: Sequence[Sequence[Action]],
    spans: Sequence[Sequence[Span]],
    moments: Sequence[Moment],
) -> Sequence[Sequence[Action]]:
    """The orders, which have no head, with each action of `moments` before those that begin at its
    time or later."""
    pairs = zip(orders, spans, strict=True)
    return [list(_anchored(order, spans_of, {}, moments, {})) for order, spans_of in pairs]


def _lookups(users: Sequence[int], spans: Mapping[Action, Span]) -> Iterator[Moment]:
    """The earliest time of each lookup: when its user begins with the micro-batch before."""
    for k, user in enumerate(users):
        for action in spans:
            if action.stage == user and action.kind is Kind.FORWARD:
                before = spans.get(action._replace(microbatch=action.microbatch - 1))
                yield (before[0] if before else 0), Action(Kind.EMBED, k, action.microbatch)


def _gradients(users: Sequence[int], spans: Mapping[Action, Span]) -> Iterator[Moment]:
    """The earliest time of the gradient of each lookup."""
    for k, user in enumerate(users):
        for action, (_, end) in spans.items():
            if action.stage == user and action.kind in BACKWARDS:
                yield end + AFTER, Action(Kind.EMBED_BACKWARD, k, action.microbatch)


def _lookups_before(
    orders: Sequence[Sequence[Action]],
    spans: Sequence[Sequence[Span]],
    lookups: Sequence[Moment],
) -> tuple[dict[Action, list[Action]], list[Moment]]:
    """The lookups before each S, and those that come before every S."""
    begun: dict[Action, float] = {}  # on all ranks
    for order, spans_of in zip(orders, spans, strict=True):
        for action, (begin, _) in zip(order, spans_of, strict=True):
            if action.kind is Kind.S:
                begun[action] = max(begin, begun.get(action, 0))
    times = sorted((begin, action) for action, begin in begun.items())
    front: dict[Action, list[Action]] = {}
    first = []
    for moment, lookup in lookups:
        k = bisect_right(times, moment, key=itemgetter(0))
        if k:
            front.setdefault(times[k - 1][1], []).append(lookup)
        else:
            first.append((moment, lookup))
    return front, first


def _gradients_after(
    placement: Sequence[int], orders: Sequence[Sequence[Action]], layers: SharedLayers
) -> tuple[dict[Action, list[Action]], list[Action]]:
    """The gradients of lookups after each T, and those at the end."""
    behind: dict[Action, list[Action]] = {}
    tail = []
    for k, user in enumerate(layers.users):
        returns, rest = returned(orders[placement[user]], k, layers)
        for i, gradients in returns.items():
            added = (Action(Kind.EMBED_BACKWARD, k, x) for x in gradients)
            behind.setdefault(Action(Kind.T, NOWHERE, i), []).extend(added)
        tail += [Action(Kind.EMBED_BACKWARD, k, i) for i in rest]
    return behind, tail


def _anchored(
    order: Sequence[Action],
    spans: Sequence[Span],
    front: Mapping[Action, Sequence[Action]],
    first: Sequence[Moment],
    behind: Mapping[Action, Sequence[Action]],
) -> Iterator[Action]:
    """The order of one rank with the actions that go before and after its own, and those of `first`
    by their times, but before every S."""
    left = 0
    for action, (begin, _) in zip(order, spans, strict=True):
        while left < len(first) and (first[left][0] <= begin or action.kind is Kind.S):
            yield first[left][1]
            left += 1
        yield from front.get(action, ())
        yield action
        yield from behind.get(action, ())
    yield from (lookup for _, lookup in first[left:])
