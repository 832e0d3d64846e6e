"""Names for blocks and for the values that cross them, as a programmer would choose them.

A block's result is called after the block (`h_3`); further results and the prologue after the
variable that holds them in the user's source (`position_bias`, `cos`). The result of a lookup on
all ranks is called after the module of the embedding (`wte`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from torch import fx

from parcompiler.capture.blocks import Cut, steps
from parcompiler.capture.templates import EMITTED, identifier, unique
from parcompiler.graph import Graph
from parcompiler.naming.source import spoken_name
from parcompiler.spmd.runtime_call import is_conversion


def variables(graph: Graph, cut: Cut) -> dict[fx.Node, str]:
    """A distinct identifier for every node that is used outside its block."""
    names: dict[fx.Node, str] = {}
    taken: set[str] = set(EMITTED)
    short = short_names(block.name for block in cut.blocks)

    def give(node: fx.Node, wish: str) -> None:
        names[node] = unique(wish, taken)

    for item in graph.inputs:
        give(graph.placeholders[item.node], identifier(item.label or item.node))
    for node, wish in _looked_up(graph).items():
        give(node, wish)
    read = {node for block in cut.blocks for node in block.inputs}
    for node in sorted(cut.prologue, key=lambda node: node not in read):
        give(node, spoken_name(node) or _buffer_name(graph, node) or identifier(node.name))
    own_names = _own_names(cut)
    for block in cut.blocks:
        *others, last = block.outputs
        give(last, "loss" if last is graph.loss else short[block.name])
        for node in others:
            plain = spoken_name(node) or identifier(node.name)
            give(node, own_names.get(node) or f"{names[last]}_{plain}")
    return names


def _looked_up(graph: Graph) -> dict[fx.Node, str]:
    """Names for results of embeddings on all ranks: by their module, else by that of the table."""
    lookups = graph.vocabulary.lookups if graph.vocabulary else ()
    paths = {}
    for item in lookups:
        stack = steps(item.node)
        owner, _, leaf = item.weight.rpartition(".")
        paths[item.node] = (stack[-1].path if stack else "") or owner or leaf
    short = short_names(dict.fromkeys(paths.values()))
    return {node: short[path] for node, path in paths.items()}


def _own_names(cut: Cut) -> Mapping[fx.Node, str]:
    """Names of further results of blocks, where their name in the source is unique."""
    others = [node for block in cut.blocks for node in block.outputs[:-1]]
    wishes = {node: spoken_name(node) for node in others}
    counts = Counter(wishes.values())
    return {node: name for node, name in wishes.items() if name and counts[name] == 1}


def _buffer_name(graph: Graph, node: fx.Node) -> str | None:
    """The buffer that a node takes a part of: `cos` for `self.cos[:12]`, and for a rank's piece."""
    if is_conversion(node):
        node = node.all_input_nodes[0]
    read = [graph.by_node[o.name] for o in node.all_input_nodes if o.name in graph.by_node]
    if len(read) != 1 or len(node.all_input_nodes) != 1:
        return None
    return identifier(read[0].name.rpartition(".")[2])


def short_names(blocks: Iterable[str]) -> dict[str, str]:
    """For each block, the shortest end of its path that tells it from the others, as an identifier.

    >>> list(short_names(["wte+wpe", "transformer.h.0", "transformer.h.1"]).values())
    ['wte_wpe', 'h_0', 'h_1']
    >>> list(short_names(["encoder.block.0", "decoder.block.0", "decoder.block.1"]).values())
    ['encoder_block_0', 'decoder_block_0', 'decoder_block_1']
    """
    names = list(blocks)
    lengths = _lengths({name: name.partition("@")[0].split(".") for name in names})
    taken: set[str] = set()
    short = {}
    for name in names:
        end = ".".join(name.partition("@")[0].split(".")[-lengths[name] :])
        short[name] = unique(identifier(end), taken)
    return short


def _lengths(paths: Mapping[str, list[str]]) -> dict[str, int]:
    """The number of parts of its path in each block's name: equal for layers of one list, whose
    paths are alike with `#` in place of numbers."""
    alike: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name, path in paths.items():
        alike[tuple("#" if part.isdigit() else part for part in path)].append(name)
    lengths: dict[str, int] = {}
    for pattern, members in alike.items():
        whole = {tuple(paths[name]) for name in members}
        length = len(pattern)
        for length in range(1, len(pattern) + 1):
            end = pattern[-length:]
            clash = [p for p in alike if p != pattern and p[-length:] == end]
            tells = len({tuple(paths[name][-length:]) for name in members}) == len(whole)
            if end[0] != "#" and tells and not clash:
                break
        lengths |= dict.fromkeys(members, length)
    return lengths
