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
from fnmatch import fnmatchcase
from functools import cache, lru_cache
from typing import NamedTuple

from torch import fx

from parcompiler.capture.clean import where
from parcompiler.capture.effects import Effects, effects_of
from parcompiler.capture.prologue import constants, is_sendable, prologue_of
from parcompiler.capture.templates import Segment, group
from parcompiler.graph import Block, Graph

SMALL_UNIT = 8  # a unit has at least 1 / SMALL_UNIT of the largest block's parameters


@dataclass(frozen=True, slots=True)
class Cut:
    """Blocks in order of execution, and the prologue that every stage computes for itself: its
    `constants` once, the rest for each micro-batch."""

    blocks: tuple[Block, ...]
    prologue: tuple[fx.Node, ...]
    constants: frozenset[fx.Node] = frozenset()

    def units(self, weights: Iterable[int]) -> list[int]:
        """The unit of each block of a stage, given the bytes of its parameters: a block is its own
        unit if it has at least 1 / SMALL_UNIT of the bytes of the largest block; others join a
        neighbour. ZeRO 3 gathers the parameters of a unit at once.

        For `embed`, `cast`, `h_0`, `h_1`, `norm` and `loss` with 8, 0, 9, 9, 1 and 0 bytes the
        units are [0, 0, 1, 2, 2, 2].
        """
        least = max((block.weights for block in self.blocks), default=0) // SMALL_UNIT
        units, unit, size = [], 0, 0
        for weight in weights:
            if size > least and weight > least:
                unit, size = unit + 1, 0
            size += weight
            units.append(unit)
        return units


class ModuleCall(NamedTuple):
    """A call of a module around a node: its path, and the number of the call from the second on."""

    path: str
    call: str

    @property
    def is_numbered(self) -> bool:
        """Whether the module is a member of a list."""
        return self.path.rpartition(".")[2].isdigit()


def cut(graph: Graph, level: int, sent: Collection[fx.Node] = ()) -> Cut:
    """The blocks of `graph` at `level` (1 is the coarsest).

    `sent` are values that could be in the prologue but are cheaper to send than to recompute:
    they stay in the block that makes them.
    """
    apart = frozenset(sent)
    return graph.once(("cut", level, apart), lambda: _cut(graph, level, apart))


def _cut(graph: Graph, level: int, sent: Collection[fx.Node]) -> Cut:
    """Uncached body of `cut`."""
    effects = effects_of(graph)
    nodes = _divisible(graph)
    unsendable = _unsendable(graph, nodes)
    segments = _keep_together(_segments(graph, nodes, level), effects, unsendable)
    home = {node: index for index, segment in enumerate(segments) for node in segment.nodes}
    prologue = prologue_of(graph, nodes, home, effects, set(sent))
    kept = [s._replace(nodes=[node for node in s.nodes if node not in prologue]) for s in segments]
    kept = _keep_together([segment for segment in kept if segment.nodes], effects, unsendable)
    parts = tuple(node for node in nodes if node in prologue)
    return Cut(group(graph, kept), parts, frozenset(prologue & constants(graph)))


def _segments(graph: Graph, nodes: list[fx.Node], level: int) -> list[Segment]:
    """The segments at a level, before those that must stay together are joined."""
    segments = _merge_bare(_runs(nodes, _key_function(nodes, level)), graph)
    if level == levels(graph)[-1]:
        segments = [piece for segment in segments for piece in _pieces(segment, graph)]
    return segments


def _unsendable(graph: Graph, nodes: list[fx.Node]) -> list[fx.Node]:
    """The nodes that yield a number or a tensor of unknown size."""
    return graph.once("unsendable", lambda: [n for n in nodes if not is_sendable(n)])


def why_so_few(graph: Graph) -> str:
    """Why `graph` has no more blocks, with the responsible line of the model."""
    nodes = _divisible(graph)
    segments = _segments(graph, nodes, levels(graph)[-1])
    home = {node: index for index, segment in enumerate(segments) for node in segment.nodes}
    effects = effects_of(graph)
    updates = ((f, e, effects.writers[root][-1]) for f, e, root in _updates(home, effects))
    reasons = {
        "is updated in place (return a new tensor there)": updates,
        "is no tensor of known size": _crossings(home, _unsendable(graph, nodes)),
    }
    spans = [
        (e - f, f, why, node) for why, pairs in reasons.items() for f, e, node in pairs if e > f
    ]
    if spans:
        length, first, why, node = max(spans, key=lambda span: span[0])
        ends = " to ".join(segments[k].path or "the model itself" for k in (first, first + length))
        joined = f"{length + 1} of {len(segments)} pieces of the model stay together ({ends})"
        return f"{joined}: what they share {why}; {where(node)}"
    several = len(segments) > 1
    count = f"{len(segments)} pieces with parameters" if several else "one piece with parameters"
    return f"the forward of the model consists of {count}: put layers into an nn.ModuleList"


def joining_updates(graph: Graph) -> list[fx.Node]:
    """The updates in place that would join pieces of `graph` at the coarsest level."""
    effects = effects_of(graph)
    segments = _segments(graph, _divisible(graph), 1) if effects.writers else []
    home = {node: index for index, segment in enumerate(segments) for node in segment.nodes}
    roots = [root for _, _, root in _updates(home, effects)]
    return [writer for root in roots for writer in effects.writers[root]]


def levels(graph: Graph) -> range:
    """The levels at which `cut` may be called: 1 … the depth of numbered modules, and pieces."""
    return graph.once("levels", lambda: range(1, depth(_divisible(graph)) + 2))


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern matches a block, or a module around it.

    >>> [matches(name, "layers.1") for name in ("layers.1", "layers.1.ffn", "layers.1@2", "head")]
    [True, True, True, False]
    >>> matches("layers.10.ffn", "*.1?.ffn")
    True
    """
    path = name.partition("@")[0].partition("#")[0].split(".")
    around = (".".join(path[:end]) for end in range(1, len(path) + 1))
    return any(fnmatchcase(item, pattern) for item in (name, *around))


def unmatched(cut: Cut, patterns: Iterable[str]) -> list[str]:
    """The patterns that match no block of a cut."""
    names = [block.name for block in cut.blocks]
    return [pattern for pattern in patterns if not any(matches(name, pattern) for name in names)]


def _divisible(graph: Graph) -> list[fx.Node]:
    """The nodes that blocks are made of: all calls but the vocabulary's, which all ranks share."""
    apart = set(graph.vocabulary.nodes) if graph.vocabulary else set()
    return [
        node for node in graph.fx_graph.nodes if node.op == "call_function" and node not in apart
    ]


def depth(nodes: Iterable[fx.Node]) -> int:
    """The deepest nesting of numbered modules; of named ones when no module is numbered."""
    stacks = [steps(node) for node in nodes]
    numbered = max((sum(step.is_numbered for step in stack) for stack in stacks), default=0)
    return numbered or max(map(len, stacks), default=0)


def steps(node: fx.Node) -> tuple[ModuleCall, ...]:
    """The calls of modules around a node, outermost first, without the model itself."""
    return _steps(tuple(node.meta.get("nn_module_stack", {}).items()))


@lru_cache(maxsize=2**14)  # nodes of one module share it
def _steps(stack: tuple[tuple[str, tuple[str, object]], ...]) -> tuple[ModuleCall, ...]:
    """The calls of modules in a stack, with the paths that the user's model has."""
    calls = (
        ModuleCall(
            "" if path == "model" else path.removeprefix("model."),
            key.rpartition("@")[2] if "@" in key else "",
        )
        for key, (path, _kind) in stack
    )
    return tuple(call for call in calls if call.path)


def _key_function(nodes: Iterable[fx.Node], level: int) -> Callable[[fx.Node], ModuleCall]:
    """A function from a node to its segment at a level: a module's call, or the glue between
    modules."""
    numbered = any(step.is_numbered for node in nodes for step in steps(node))

    @cache  # nodes of one module share it
    def key(stack: tuple[ModuleCall, ...]) -> ModuleCall:
        candidates = [step for step in stack if step.is_numbered or not numbered]
        return candidates[min(level, len(candidates)) - 1] if candidates else ModuleCall("", "")

    return lambda node: key(steps(node))


def layer_of(nodes: Iterable[fx.Node]) -> Callable[[fx.Node], ModuleCall]:
    """A function from a node to its block at the coarsest level."""
    return _key_function([node for node in nodes if node.op == "call_function"], 1)


def _runs(nodes: list[fx.Node], key: Callable[[fx.Node], ModuleCall]) -> list[Segment]:
    """Maximal runs of consecutive nodes with the same key."""
    groups = itertools.groupby(nodes, key)
    return [Segment(path, call, list(members), path) for (path, call), members in groups]


def _weight(segment: Segment, graph: Graph) -> int:
    """How many parameter elements the nodes of a segment read."""
    read = {operand.name for node in segment.nodes for operand in node.all_input_nodes}
    return sum(graph.by_node[name].numel for name in read if name in graph.by_node)


def _merge_bare(segments: list[Segment], graph: Graph) -> list[Segment]:
    """Join segments without parameters to the one before (activations, residual sums, the loss)."""
    merged: list[Segment] = []
    for segment in segments:
        if merged and _weight(segment, graph) == 0:
            merged[-1].nodes.extend(segment.nodes)
        else:
            merged.append(segment)
    if len(merged) > 1 and _weight(merged[0], graph) == 0:
        first = merged.pop(0)
        merged[0] = merged[0]._replace(nodes=first.nodes + merged[0].nodes)
    return merged


def _pieces(segment: Segment, graph: Graph) -> list[Segment]:
    """A layer cut between its heavy children: [norm, attention, sum] and [norm, MLP, sum]."""
    prefix = f"{segment.path}." if segment.path else ""

    def child(node: fx.Node) -> ModuleCall:
        inner = (s for s in steps(node) if s.path.startswith(prefix) and s.path != segment.path)
        return next(inner, ModuleCall(segment.path, ""))

    children = _merge_bare(_runs(segment.nodes, child), graph)
    total = sum(_weight(piece, graph) for piece in children)
    pieces: list[Segment] = []
    light: list[fx.Node] = []
    for piece in children:
        light += piece.nodes
        if _weight(piece, graph) * 20 >= total:
            path = piece.path if segment.path else ""
            pieces.append(Segment(path, piece.call or segment.call, light, segment.path))
            light = []
    if len(pieces) < 2:
        return [segment]
    pieces[-1].nodes.extend(light)
    return pieces


def _keep_together(
    segments: list[Segment], effects: Effects, unsendable: Collection[fx.Node]
) -> list[Segment]:
    """Join segments that must stay together: those that share memory updated in place, the maker
    and the readers of a value that cannot be sent, and a segment that nothing reads with the one
    before.

    Repeated until nothing changes, as a joined segment may have to be joined again.
    """
    home = {node: index for index, segment in enumerate(segments) for node in segment.nodes}
    last = list(range(len(segments)))
    for first, end, _ in itertools.chain(_updates(home, effects), _crossings(home, unsendable)):
        last[first] = max(last[first], end)
    for index, segment in enumerate(segments):  # a block has a result
        inside = set(segment.nodes)
        if all(user in inside for node in segment.nodes for user in node.users):
            first, end = max(index - 1, 0), min(max(index, 1), len(segments) - 1)
            last[first] = max(last[first], end)
    joined: list[Segment] = []
    end = -1
    for index, segment in enumerate(segments):
        if index <= end:
            joined[-1].nodes.extend(segment.nodes)
        else:
            joined.append(segment._replace(nodes=list(segment.nodes)))
        end = max(end, last[index])
    same = len(joined) == len(segments)
    return joined if same else _keep_together(joined, effects, unsendable)


def _updates(home: dict[fx.Node, int], effects: Effects) -> Iterator[tuple[int, int, fx.Node]]:
    """First and last segment that update the same memory in place, and the node that made it. After
    the last update it is a value like any other, and its views are readers."""
    sharing: dict[fx.Node, list[fx.Node]] = {}
    for node in home if effects.writers else ():
        sharing.setdefault(effects.root(node), []).append(node)
    for root, writers in effects.writers.items():
        touching = [n for n in sharing.get(root, ()) if not effects.is_settled(n)] + writers
        if root.op == "placeholder":  # a buffer that the forward updates: it lives on one stage
            touching = [user for node in (root, *sharing.get(root, ())) for user in node.users]
            touching += [*sharing.get(root, ()), *writers]
        spots = {home[node] for node in touching if node in home}
        if len(spots) > 1:
            yield min(spots), max(spots), root


def _crossings(
    home: dict[fx.Node, int], unsendable: Collection[fx.Node]
) -> Iterator[tuple[int, int, fx.Node]]:
    """The segment that makes, and the last that reads, a number or a tensor of unknown size."""
    for node in unsendable:
        index = home.get(node)
        if index is not None:
            readers = (home[user] for user in node.users if user in home)
            yield index, max([index, *readers]), node
