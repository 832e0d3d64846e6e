"""A graph cut into blocks along the module tree, and blocks grouped into templates.

    nodes in order      wte wpe │ h.0 ……… │ h.1 ……… │ ln_f lm_head loss
                        └ glue ┘└ block ─┘└ block ─┘└──── glue ──────┘

Level 1 cuts at the outermost numbered modules (`h.0`, `h.1`: the layers), level 2 at the next
numbered ones inside (`stages.0.layers.1`), and so on; the last level cuts a layer into pieces
(attention | MLP). A model without numbered modules is cut at its named children instead.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import fx

from parcompiler.capture.clean import where
from parcompiler.capture.effects import Effects, effects_of
from parcompiler.capture.prologue import prologue_of
from parcompiler.capture.templates import Run, group
from parcompiler.graph import Block, Graph


@dataclass(frozen=True, slots=True)
class Cut:
    """Blocks in order of execution, and the prologue that every stage computes for itself."""

    blocks: tuple[Block, ...]
    prologue: tuple[fx.Node, ...]


class Step(NamedTuple):
    """One module on the way from the model to the node: its path and which call of it this is."""

    path: str
    call: str


def cut(graph: Graph, level: int, sent: Collection[fx.Node] = ()) -> Cut:
    """The blocks of `graph` at `level` (1 is the coarsest).

    `sent` are values that could be in the prologue but are cheaper to send than to recompute:
    they stay in the block that makes them.
    """
    apart = frozenset(sent)
    return graph.once(("cut", level, apart), lambda: _cut(graph, level, apart))


def _cut(graph: Graph, level: int, sent: Collection[fx.Node]) -> Cut:
    """The blocks of `graph`, cut."""
    effects = effects_of(graph)
    nodes = _divisible(graph)
    unsendable = _unsendable(graph, nodes)
    runs = _keep_together(_apart(graph, nodes, level), effects, unsendable)
    home = {node: index for index, run in enumerate(runs) for node in run.nodes}
    prologue = prologue_of(graph, nodes, home, effects, set(sent))
    parts = [[node for node in run.nodes if node not in prologue] for run in runs]
    kept = [run._replace(nodes=part) for run, part in zip(runs, parts, strict=True) if part]
    blocks = group(graph, _keep_together(kept, effects, unsendable))
    return Cut(blocks, tuple(node for node in nodes if node in prologue))


def _apart(graph: Graph, nodes: list[fx.Node], level: int) -> list[Run]:
    """The runs at a level, before those that no cut may part are joined."""
    runs = _merge_bare(list(_runs(nodes, _key_function(nodes, level))), graph)
    if level > depth(nodes):
        runs = [piece for run in runs for piece in _pieces(run, graph)]
    return runs


def _unsendable(graph: Graph, nodes: list[fx.Node]) -> list[fx.Node]:
    """The nodes that yield a number or a tensor of unknown size."""
    return graph.once("unsendable", lambda: [n for n in nodes if not is_sendable(n)])


def why_so_few(graph: Graph) -> str:
    """What keeps the blocks of `graph` from being more, with the line that is to blame."""
    nodes = _divisible(graph)
    runs = _apart(graph, nodes, levels(graph)[-1])
    home = {node: index for index, run in enumerate(runs) for node in run.nodes}
    reasons = {
        "is updated in place (return a new tensor there)": _updates(home, effects_of(graph)),
        "is no tensor of known size": _crossings(home, _unsendable(graph, nodes)),
    }
    spans = [
        (e - f, f, why, node) for why, pairs in reasons.items() for f, e, node in pairs if e > f
    ]
    if spans:
        length, first, why, node = max(spans, key=lambda span: span[0])
        ends = " to ".join(runs[k].path or "the model itself" for k in (first, first + length))
        joined = f"{length + 1} of {len(runs)} pieces of the model stay together ({ends})"
        return f"{joined}: what they share {why}; {where(node)}"
    count = f"{len(runs)} pieces with parameters" if len(runs) > 1 else "one piece with parameters"
    return f"the forward of the model consists of {count}: put layers into an nn.ModuleList"


def levels(graph: Graph) -> range:
    """The levels at which `cut` may be called: 1 … the depth of numbered modules, and pieces."""
    return graph.once("levels", lambda: range(1, depth(_divisible(graph)) + 2))


def _divisible(graph: Graph) -> list[fx.Node]:
    """The nodes that blocks are made of: all calls but the vocabulary's, which all ranks share."""
    apart = set(graph.vocabulary.nodes) if graph.vocabulary else set()
    return [
        node for node in graph.fx_graph.nodes if node.op == "call_function" and node not in apart
    ]


def depth(nodes: Iterable[fx.Node]) -> int:
    """The deepest nesting of numbered modules; of named ones when no module is numbered."""
    stacks = [steps(node) for node in nodes]
    numbered = max((len(_numbered(stack)) for stack in stacks), default=0)
    return numbered or max((len(stack) for stack in stacks), default=0)


def steps(node: fx.Node) -> list[Step]:
    """The modules around a node, outermost first, without the model itself."""
    return list(_steps(tuple(node.meta.get("nn_module_stack", {}).items())))


@lru_cache(maxsize=2**14)  # the nodes of a module have the same
def _steps(stack: tuple[tuple[str, tuple[str, object]], ...]) -> tuple[Step, ...]:
    """The modules of a stack, without the model itself."""
    found = (_step(key, path) for key, (path, _kind) in stack)
    return tuple(step for step in found if step.path)


@lru_cache(maxsize=2**14)
def _step(key: str, path: str) -> Step:
    """A module path of the export as the user's model has it, and which call it is."""
    path = "" if path == "model" else path.removeprefix("model.")
    return Step(path, key.rpartition("@")[2] if "@" in key else "")


def _numbered(stack: list[Step]) -> list[Step]:
    """The steps into numbered modules (members of lists)."""
    return [step for step in stack if _is_numbered(step.path)]


@lru_cache(maxsize=2**14)
def _is_numbered(path: str) -> bool:
    """Whether a module is a member of a list."""
    return path.rpartition(".")[2].isdigit()


def _key_function(nodes: list[fx.Node], level: int) -> Callable[[fx.Node], Step]:
    """Which run a node belongs to at a level: a module's step, or the glue between modules."""
    numbered = any(_numbered(steps(node)) for node in nodes)

    def key(node: fx.Node) -> Step:
        stack = steps(node)
        candidates = _numbered(stack) if numbered else stack
        return candidates[min(level, len(candidates)) - 1] if candidates else Step("", "")

    return key


def layer_of(nodes: Iterable[fx.Node]) -> Callable[[fx.Node], Step]:
    """Which block of the coarsest level a node belongs to."""
    return _key_function([node for node in nodes if node.op == "call_function"], 1)


def _runs(nodes: list[fx.Node], key: Callable[[fx.Node], Step]) -> Iterator[Run]:
    """Maximal runs of consecutive nodes with the same key."""
    for (path, call), members in itertools.groupby(nodes, key):
        yield Run(path, call, list(members), path)


def _weight(run: Run, graph: Graph) -> int:
    """How many parameter elements the nodes of a run read."""
    read = {operand.name for node in run.nodes for operand in node.all_input_nodes}
    return sum(graph.by_node[name].numel for name in read if name in graph.by_node)


def _merge_bare(runs: list[Run], graph: Graph) -> list[Run]:
    """Join runs without parameters to the run before (activations, residual sums, the loss)."""
    merged: list[Run] = []
    for run in runs:
        if merged and _weight(run, graph) == 0:
            merged[-1].nodes.extend(run.nodes)
        else:
            merged.append(run)
    if len(merged) > 1 and _weight(merged[0], graph) == 0:
        first = merged.pop(0)
        merged[0] = merged[0]._replace(nodes=first.nodes + merged[0].nodes)
    return merged


def _pieces(run: Run, graph: Graph) -> list[Run]:
    """A layer cut between its heavy children: [norm, attention, sum] and [norm, MLP, sum]."""
    prefix = f"{run.path}." if run.path else ""

    def child(node: fx.Node) -> Step:
        inner = [step for step in steps(node) if step.path.startswith(prefix)]
        inner = [step for step in inner if step.path != run.path]
        return inner[0] if inner else Step(run.path, "")

    runs = _merge_bare(list(_runs(run.nodes, child)), graph)
    total = sum(_weight(piece, graph) for piece in runs)
    pieces: list[Run] = []
    light: list[fx.Node] = []
    for piece in runs:
        light += piece.nodes
        if _weight(piece, graph) * 20 >= total:
            path = piece.path if run.path else ""
            pieces.append(Run(path, piece.call or run.call, light, run.path))
            light = []
    if len(pieces) < 2:
        return [run]
    pieces[-1].nodes.extend(light)
    return pieces


def _keep_together(runs: list[Run], effects: Effects, unsendable: Collection[fx.Node]) -> list[Run]:
    """Join the runs that no cut may part: what updates memory in place, what makes and reads a
    value that cannot be sent, and what nothing reads with what stands before it."""
    while True:
        joined = _joined(runs, effects, unsendable)
        if len(joined) == len(runs):
            return joined
        runs = joined


def _joined(runs: list[Run], effects: Effects, unsendable: Collection[fx.Node]) -> list[Run]:
    """One round: joining runs may leave others to join."""
    home = {node: index for index, run in enumerate(runs) for node in run.nodes}
    last = list(range(len(runs)))
    shared = itertools.chain(_updates(home, effects), _crossings(home, unsendable))
    together = ((first, end) for first, end, _ in shared)
    for first, end in itertools.chain(together, _without_results(runs)):
        last[first] = max(last[first], end)
    joined: list[Run] = []
    end = -1
    for index, run in enumerate(runs):
        if index <= end:
            joined[-1].nodes.extend(run.nodes)
        else:
            joined.append(run._replace(nodes=list(run.nodes)))
        end = max(end, last[index])
    return joined


def _updates(home: dict[fx.Node, int], effects: Effects) -> Iterator[tuple[int, int, fx.Node]]:
    """The first and last run that touch memory which is updated in more than one of them, and the
    last update. After that it is a value like others, and views of it are readers."""
    sharing: dict[fx.Node, list[fx.Node]] = {}
    for node in home if effects.writers else ():
        sharing.setdefault(effects.root(node), []).append(node)
    for root, writers in effects.writers.items():
        touching = [n for n in sharing.get(root, ()) if not effects.is_settled(n)] + writers
        if root.op == "placeholder":  # a buffer that the forward updates: it has one home
            touching = [user for node in (root, *sharing.get(root, ())) for user in node.users]
            touching += [*sharing.get(root, ()), *writers]
        spots = {home[node] for node in touching if node in home}
        if len(spots) > 1:
            yield min(spots), max(spots), writers[-1]


def _crossings(
    home: dict[fx.Node, int], unsendable: Collection[fx.Node]
) -> Iterator[tuple[int, int, fx.Node]]:
    """The run that makes, and the last that reads, a number or a tensor of unknown size."""
    for node in unsendable:
        index = home.get(node)
        if index is not None:
            readers = (home[user] for user in node.users if user in home)
            yield index, max([index, *readers]), node


def is_sendable(node: fx.Node) -> bool:
    """Whether a node yields a tensor whose size is known before the step."""
    value = node.meta.get("val")
    if isinstance(value, list | tuple):
        return True  # its items are sent
    return isinstance(value, torch.Tensor) and all(isinstance(size, int) for size in value.shape)


def _without_results(runs: list[Run]) -> Iterator[tuple[int, int]]:
    """Each run that no other reads, with the one before it: a block has a result."""
    for index, run in enumerate(runs):
        inside = set(run.nodes)
        if all(user in inside for node in run.nodes for user in node.users):
            yield max(index - 1, 0), min(max(index, 1), len(runs) - 1)
