"""Whether a plan that is given keeps to the pins that are given with it."""

from __future__ import annotations

from parcompiler.errors import PlanError
from parcompiler.passes.shard.assign import assignment
from parcompiler.passes.shard.pins import agrees, read
from parcompiler.plan import Plan
from parcompiler.problem import Problem
from parcompiler.spmd.shard import stored


def check_pins(problem: Problem, plan: Plan) -> None:
    """Refuse a plan under which ranks hold a parameter otherwise than is demanded.

    Raises PlanError, naming the pin and the parameter; InputError for a pin that names nothing.
    """
    pins = read(problem.options.sharding, problem.graph)
    if not pins.placements or plan.sharding is None:
        return
    graph = problem.graph
    for node, found in stored(graph, assignment(graph, plan)).items():
        item = graph.by_node.get(node.name)
        if item is None:
            continue
        for pattern in pins.of(item.name):
            wanted = pins.placements[pattern]
            if not agrees(found, wanted):
                shape = " x ".join(map(str, item.shape))
                message = (
                    f"the plan holds {item.name} ({shape}) as {found}, but sharding pins "
                    f"{pattern!r}: '{wanted}': change the pin, or compile without plan="
                )
                raise PlanError(message)
