"""Problems written by hand: blocks with the costs that a test wants, without a model.

    embedding ──► layers.0 ──► … ──► layers.n-1 ──► head

Level 1 has these blocks, level 2 cuts each layer into halves. Each block has one parameter tensor
and hands one value of VALUE bytes to the next.
"""

import dataclasses
from collections.abc import Sequence

import torch
from torch import fx

import parcompiler as pc
from parcompiler.capture.blocks import Cut
from parcompiler.cost import BlockCost
from parcompiler.device import Device, Link, device
from parcompiler.graph import Binding, Block, Graph, Parameter
from parcompiler.options import Options
from parcompiler.priced import Priced
from parcompiler.problem import Cache, Problem

VALUE = 400
TRAINED = "trained_{}"  # a node of each block by which it has a backward; values have no gradient


def small(memory: int = 10**12, latency: float = 0.0) -> Device:
    """A device with a memory of so many bytes, and links without cost but a latency."""
    link = Link(bandwidth=1e30, latency=latency)
    return dataclasses.replace(device("cpu"), name="small", memory=memory, link=link)


def plain(microbatches: int) -> Options:
    """1F1B without recomputation."""
    return Options(microbatches=microbatches, schedule="1f1b", recompute="none")


def chain(
    seconds: Sequence[float],
    *,
    elements: Sequence[int] | None = None,
    saved: Sequence[int] | None = None,
    stages: int = 2,
    on: Device | None = None,
    skips: Sequence[tuple[int, int]] = (),
    shared: Sequence[int] = (),
    options: Options | None = None,
) -> Problem:
    """A chain of blocks: the first is the embedding, the last the head, the rest are layers.

    `seconds` are those of forward and backward of each block, `elements` its parameters, `saved`
    its bytes kept for the backward. On level 1, `skips` are further values (from block, to block),
    and the blocks in `shared` use one parameter of block `shared[0]`.
    """
    count = len(seconds)
    elements = elements or [2] * count
    names = ["embedding", *(f"layers.{i}" for i in range(count - 2)), "head"]
    kept = saved or [0] * count
    whole = _priced(names, seconds, elements, kept, skips, shared)
    halves = [
        (f"{name}.{half}", seconds[b] / 2, elements[b] // 2, kept[b] // 2)
        for b, name in enumerate(names)
        for half in ("attention", "ffn")
        if 0 < b < count - 1
    ]
    fine = [
        (names[0], seconds[0], elements[0], kept[0]),
        *halves,
        (names[-1], seconds[-1], elements[-1], kept[-1]),
    ]
    cut_finely = _priced(
        [name for name, *_ in fine],
        [time for _, time, *_ in fine],
        [size for *_, size, _ in fine],
        [size for *_, size in fine],
    )
    parameters = {
        binding.name: Parameter(binding.name, binding.name, (elements[b],), torch.float32)
        for b, block in enumerate(whole.cut.blocks)
        for binding in block.tensors
        if binding.name == f"{names[b]}.weight"
    }
    parameters |= {
        f"{name}.weight": Parameter(f"{name}.weight", f"{name}.weight", (size,), torch.float32)
        for name, _, size, _ in fine
    }
    graph = Graph(
        name="Handmade",
        fx_graph=fx.Graph(),
        parameters=tuple(parameters.values()),
        inputs=(),
        loss=whole.cut.blocks[-1].nodes[0],
        tensors={},
        differentiable=frozenset(TRAINED.format(b) for b in range(2 * count)),
    )
    problem = Problem(
        graph,
        pc.Mesh(pipeline=stages, device=on or small()),
        options or plain(4),
        cache=Cache(
            priced={
                (k, frozenset(), False, False, False): p for k, p in ((1, whole), (2, cut_finely))
            },
        ),
    )
    problem.__dict__["levels"] = range(1, 3)
    graph.__dict__["unread"] = frozenset()  # of the blocks at either granularity
    return problem


def _priced(
    names: Sequence[str],
    seconds: Sequence[float],
    elements: Sequence[int],
    saved: Sequence[int],
    skips: Sequence[tuple[int, int]] = (),
    shared: Sequence[int] = (),
) -> Priced:
    """Blocks with nodes between them, and their costs."""
    graph = fx.Graph()
    nodes: list[fx.Node] = []
    for b in range(len(names)):
        before = [nodes[b - 1]] if b else []
        before += [nodes[a] for a, c in skips if c == b]
        node = graph.call_function(torch.ops.aten.add.Tensor, tuple(before))
        node.meta["val"] = torch.empty(VALUE // 4, device="meta")
        nodes.append(node)
    blocks = []
    for b, name in enumerate(names):
        inner = graph.create_node("call_function", torch.relu, name=TRAINED.format(b))
        owners = [b, shared[0]] if b in shared and b != shared[0] else [b]
        blocks.append(
            Block(
                name=name,
                template=name,
                nodes=(nodes[b], inner),
                inputs=tuple(nodes[b].all_input_nodes),
                outputs=(nodes[b],) if nodes[b].users else (),
                tensors=tuple(Binding(f"w{k}", f"{names[o]}.weight") for k, o in enumerate(owners)),
                scope=name if name.startswith("layers") else "",
            )
        )
    costs = tuple(
        BlockCost((), (), saved=size, saved_inputs=0, output_bytes=VALUE, estimated=())
        for size in saved
    )
    return Priced(
        cut=Cut(tuple(blocks), ()),
        costs=costs,
        forward=tuple(s / 3 for s in seconds),
        backward=tuple(s * 2 / 3 for s in seconds),
        weight=tuple(s / 3 for s in seconds),
        hidden=(0.0,) * len(seconds),
        sent=(),
    )
