"""A stupid search for what a simulated step lasts for: a chain of events that leaves no gap."""

from parcompiler.instruction import Kind
from parcompiler.timeline import Timeline, TimelineEvent

OF_SEVERAL = {Kind.SHARE_LOSS, Kind.REDUCE_GRADIENTS, Kind.UPDATE}  # wait for all their ranks


def unbroken(timeline: Timeline) -> list[TimelineEvent]:
    """Events from the end of a step to its begin, each begun by the end of the next one.

    A sum of gradients may begin within a backward. The list is empty where there is a gap.
    """
    ends = [event for event in timeline.events if event.end == timeline.step_time]
    paths = [[event] for event in ends[:1]]
    seen = set(paths[0]) if paths else set()
    while paths:
        path = paths.pop()
        if path[-1].begin == 0.0:
            return path
        for event in timeline.events:
            if event not in seen and _causes(event, path[-1]):
                seen.add(event)
                paths.append([*path, event])
    return []


def _causes(before: TimelineEvent, after: TimelineEvent) -> bool:
    """Whether an event begins another by its end."""
    kinds = before.instruction.kind, after.instruction.kind
    touched = {before.rank}
    if kinds[0] is Kind.SEND and before.instruction.peer is not None:
        touched.add(before.instruction.peer)
    if kinds == (Kind.BACKWARD, Kind.REDUCE_GRADIENTS) and before.rank == after.rank:
        return before.begin < after.begin <= before.end
    return before.end == after.begin and (after.rank in touched or kinds[1] in OF_SEVERAL)
