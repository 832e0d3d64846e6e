"""Programs that the report tests look at: captured once, on a device with figures of its own."""

import dataclasses
from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from parcompiler.capture import capture
from parcompiler.capture.clean import simplify
from parcompiler.device import Device, Link
from parcompiler.graph import Graph
from parcompiler.lower import Lowered, lower
from parcompiler.mesh import Mesh
from parcompiler.models import gpt, t5
from parcompiler.options import Options
from parcompiler.plan import Plan, Shape, Solution, StageChoice
from parcompiler.prices import message_seconds, simulate_lowered, stage_costs
from parcompiler.problem import Problem
from parcompiler.report import Report
from parcompiler.timeline import Timeline

DEVICE = Device.from_json("""
{
  "name": "testbed",
  "flops": {"float32": 1e12, "float64": 5e11},
  "memory_bandwidth": 1e11,
  "memory": 8388608,
  "launch_overhead": 1e-6,
  "efficiency":
    {"matmul": 0.5, "attention": 0.5, "convolution": 0.5, "other": 0.5, "bandwidth": 0.5},
  "link": {"bandwidth": 1e10, "latency": 1e-5},
  "network": {"bandwidth": 1e9, "latency": 1e-4}
}
""")


@dataclasses.dataclass(frozen=True)
class Made:
    """A program and its report."""

    problem: Problem
    plan: Plan
    lowered: Lowered
    timeline: Timeline
    report: Report


def captured(model: nn.Module, inputs: tuple[Any, ...]) -> Graph:
    """The graph of a model, as `compile` has it."""
    return simplify(capture(model, inputs))


def make(
    graph: Graph,
    counts: Sequence[int],
    microbatches: int = 4,
    device: Device = DEVICE,
    schedule: str = "1f1b",
    solution: Solution | None = None,
    recompute: Sequence[str] = (),
) -> Made:
    """The program whose stages hold so many blocks each."""
    problem = Problem(graph, Mesh(pipeline=len(counts), device=device), Options(microbatches))
    priced = problem.priced(1)
    names = [block.name for block in priced.cut.blocks]
    assert sum(counts) == len(names), names
    begins = [0, *accumulate(counts)]
    plan = Plan(
        model=graph.name,
        fingerprint=graph.fingerprint,
        mesh=Shape(pipeline=len(counts), device=device.name),
        microbatches=microbatches,
        schedule=schedule,
        granularity=1,
        sent=tuple(node.name for node in priced.sent),
        stages=tuple(
            StageChoice(tuple(names[begin:end]), rank)
            for rank, (begin, end) in enumerate(pairwise(begins))
        ),
        solution=solution,
        recompute=tuple(recompute),
    )
    lowered = lower(graph, plan, priced.cut)
    costs = stage_costs(problem, plan, lowered)
    timeline = simulate_lowered(lowered, costs, message_seconds(problem, lowered))
    report = Report.of(problem, plan, lowered, timeline)
    return Made(problem, plan, lowered, timeline, report)


def tokens(rows: int, sequence: int) -> Tensor:
    """Integers without values: shapes are all that a report is made of."""
    return torch.zeros(rows, sequence, dtype=torch.long, device="meta")


@cache
def small_gpt() -> Made:
    """Four tied layers on two stages."""
    with torch.device("meta"):
        model = gpt.GPT(gpt.Config(layers=4, heads=4, hidden=64, vocabulary=512, sequence=32))
    batch = tokens(2, 32)
    graph = captured(model, (batch, batch))
    return make(graph, (4, 2), solution=Solution("optimal", 1.26e-3, 1.2e-3, 0.05))


@cache
def small_t5() -> Made:
    """An encoder and a decoder on four stages: values skip stages, three ranks share a tensor."""
    with torch.device("meta"):
        model = t5.T5(t5.Config(layers=4, heads=4, hidden=64, vocabulary=512, sequence=32))
    batch = tokens(2, 32)
    graph = captured(model, (batch, batch, batch))
    solution = Solution("given", 5.2e-3, 0.0, 0.0)
    return make(graph, (3, 3, 2, 3), microbatches=8, schedule="gpipe", solution=solution)


HOSTILE = (
    "[red]x[/red]",
    "a\nb",
    "\x1b[31mred\x1b[0m",
    "\u202egnp",
    "\xe9\u0301\u4e2d",
    "{0}</pre><script>",
)


class Layer(nn.Module):
    """A layer that reads a mask, with an operator that cannot run without data."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, hidden)
        self.unread = nn.Parameter(torch.zeros(3))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Masked, mixed, dropped."""
        y = self.linear(x.masked_fill(mask, 0.0)).unsqueeze(0).squeeze_(0)
        dropped: Tensor = self.dropout(y)
        return x + dropped


class Odd(nn.Module):
    """What deserves a second look: strange names, a mask, chance, frozen and unread parameters."""

    def __init__(self, hidden: int = 8) -> None:
        super().__init__()
        self.start = nn.Linear(hidden, hidden)
        for name in HOSTILE:
            self.add_module(name, Layer(hidden))
        self.head = nn.Linear(hidden, hidden).requires_grad_(False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """Every layer reads the mask, the head also what came first."""
        mask = labels > 3
        first = y = self.start(x)
        for layer in self.children():
            y = layer(y, mask) if isinstance(layer, Layer) else y
        difference: Tensor = self.head(y) + first - labels
        return difference.pow(2).mean()


@cache
def odd_graph() -> Graph:
    """The graph of the odd model."""
    with torch.device("meta"):
        return captured(Odd(), (torch.zeros(2, 8), torch.zeros(2, 8)))


@cache
def odd() -> Made:
    """The odd model on three stages."""
    return make(odd_graph(), (3, 2, 3))


@cache
def odd_on_slow_device() -> Made:
    """The odd model where computing is slow and messages are fast: nothing is recomputed."""
    fast = Link(bandwidth=1e12, latency=0.0)
    return make(odd_graph(), (3, 2, 3), device=dataclasses.replace(DEVICE, link=fast))
