"""Costs of a vocabulary on all ranks, which have equal shares of its rows.

    x [n, h]    W own rows [k, h]    Y [n, k]

    S           Y = x Wᵀ, softmax of Y in place; vocab-2 also A = P' W            [n, h]
    NORMALIZE   (naive, interlaced) the exponentials, as S only computes the largest logits
    T           W.grad += P'ᵀ x; A except under vocab-2

The passes are run on tensors without data, as blocks are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, fx

from parcompiler.cost import collective
from parcompiler.cost.collective import RankGroup, neighbours
from parcompiler.cost.execution import Recorder, execute
from parcompiler.cost.operation import Operation
from parcompiler.cost.roofline import seconds
from parcompiler.cost.stand_in import stand_in
from parcompiler.device import Device
from parcompiler.graph import EmbeddingLookup, Graph, Parameter, VocabularyHead, nbytes_of
from parcompiler.instruction import ASKS_FIRST
from parcompiler.pieces import rows

BLOCK = 2**27  # most elements of a block of logits that is widened, except on a CPU
Operations = dict[str, tuple[Operation, ...]]


def vocabulary_parts(
    graph: Graph,
    ranks: int,
    method: str,
    device: Device,
    state_bytes: Callable[[Parameter], int],
    *,
    update_seconds: Callable[[Parameter], float] | None = None,
    everywhere: bool = False,
    group: RankGroup | None = None,
) -> dict[str, float]:
    """Seconds and bytes of one micro-batch on each of `ranks` ranks, by the fields of
    `VocabularyCost`.

    `state_bytes` gives the bytes of a parameter with its gradient and optimizer states, and
    `update_seconds` the seconds of its update (None: no update). `everywhere` says that a REDUCE
    leaves its sum on all ranks (a tensor axis); `group` are the ranks if their numbers do not
    follow one another.
    """
    among = group or neighbours(ranks, device)
    assert graph.vocabulary is not None, "the graph's vocabulary is not spread"
    head, lookups = graph.vocabulary.head, graph.vocabulary.lookups
    parts: dict[str, float] = dict(_collectives(graph, among, method, device, everywhere))
    work = _head(graph, head, ranks, method) if head else {}
    embeds = [_lookup(graph, item, ranks) for item in lookups]
    for name in ("s", "normalize", "t"):
        parts[name] = seconds(work.get(name, ()), device)
    for name in ("embed", "embed_backward"):
        parts[name] = sum(seconds(item[name], device) for item in embeds)
    parts["resident"] = sum(map(state_bytes, vocabulary_rows(graph, ranks)))
    parts["step"] = sum(map(update_seconds, vocabulary_rows(graph, ranks))) if update_seconds else 0
    parts["saved"] = _saved(graph, head, ranks) if head else 0
    parts["reused"] = _matrix(graph, head, ranks) if head else 0
    parts["more"] = _widened(graph, head, ranks) if head else 0
    parts["x_bytes"] = nbytes_of(head.x) if head else 0
    parts["embedded_bytes"] = sum(nbytes_of(item.node) for item in lookups)
    return parts


def vocabulary_rows(graph: Graph, ranks: int) -> list[Parameter]:
    """The tensors of which each rank holds rows, in the size of a rank's piece; tied ones once."""
    assert graph.vocabulary is not None
    return [_piece(graph.by_name[name], ranks) for name in graph.vocabulary.tensors]


def parameters_held(graph: Graph, ranks: int) -> Mapping[str, Parameter]:
    """The tensors by name, in the size in which a rank holds them: of a vocabulary on all ranks it
    has rows."""
    if graph.vocabulary is None:
        return graph.by_name

    def find() -> Mapping[str, Parameter]:
        return {**graph.by_name, **{item.name: item for item in vocabulary_rows(graph, ranks)}}

    return graph.once(("held", ranks), find)


def _piece(item: Parameter, ranks: int) -> Parameter:
    """A tensor of the model with a rank's rows; a bias may be [1, V]."""
    shape = item.shape if len(item.shape) == 2 and item.shape[0] > 1 else (item.numel,)
    return replace(item, shape=(rows(shape[0], ranks), *shape[1:]))


def _head(graph: Graph, head: VocabularyHead, ranks: int, method: str) -> Operations:
    """The operations of S, NORMALIZE and T."""
    x, weight = stand_in(head.x.meta["val"]), _piece_of(graph, head.weight, ranks)
    recorder, operations = Recorder(), {}
    with recorder, torch.no_grad():
        if head.bias is None:  # Y of this rank's rows
            y = torch.mm(x, weight.t())
        else:
            y = torch.addmm(_piece_of(graph, head.bias, ranks), x, weight.t())
        if method in ASKS_FIRST:
            logits, _ = _logits(head, y, recorder)
            logits.to(_precision(y)).amax(1)
            operations["s"] = recorder.take()
        _softmax(head, y, recorder)
        if method in ASKS_FIRST:
            operations["normalize"] = recorder.take()
        else:
            if method == "vocab-2":
                _input_gradient(y, weight)
            operations["s"] = recorder.take()
        if method != "vocab-2":
            _input_gradient(y, weight)
        # W.grad += P'ᵀ x, scaled by rows; likewise for the bias
        scaled = x * x.new_empty(len(x), 1)
        torch.addmm(torch.empty_like(weight), y.to(weight.dtype).t(), scaled)
        if head.bias is not None and graph.by_name[head.bias].trainable:
            y.sum(0)
        operations["t"] = recorder.take()
    return operations


def _softmax(head: VocabularyHead, y: Tensor, recorder: Recorder) -> None:
    """P' of the logits, in place; 16-bit logits are widened for it, and narrowed again."""
    logits, slope = _logits(head, y, recorder)
    values = logits.to(_precision(y))
    powers = torch.softmax(values, 1)
    powers.amax(1)
    if slope is not None:
        powers.mul_(slope)
    if values is not logits:
        values.amax(1)
        y.copy_(powers)


def _precision(y: Tensor) -> torch.dtype:
    """The dtype in which the softmax of logits is computed."""
    return torch.float64 if y.dtype == torch.float64 else torch.float32


def _logits(head: VocabularyHead, y: Tensor, recorder: Recorder) -> tuple[Tensor, Tensor | None]:
    """The logits after the functions between product and loss, and the derivative of these
    functions (None: it is 1)."""
    if head.logits is None:
        return y, None
    nodes = list(head.logits.nodes)
    with torch.enable_grad():
        leaf = y.detach().requires_grad_()
        values: dict[fx.Node, Tensor] = {nodes[0]: leaf}
        execute(nodes[1:-1], values, recorder)
        logits = values[nodes[-2]]
    if not logits.requires_grad:
        return logits.detach(), None
    (slope,) = torch.autograd.grad(logits, leaf, torch.empty_like(logits))
    return logits.detach(), slope


def _input_gradient(powers: Tensor, weight: Tensor) -> None:
    """A = P' W, scaled by rows, with the rows of the labels added."""
    product = torch.mm(powers.to(weight.dtype), weight)
    product.mul_(product.new_empty(len(product), 1))
    product.addcmul_(product.new_empty(len(product), 1), torch.empty_like(product))


def _lookup(graph: Graph, item: EmbeddingLookup, ranks: int) -> Operations:
    """The operations of EMBED and EMBED_BACKWARD: rows on this rank, and zeros for all others."""
    weight, like = _piece_of(graph, item.weight, ranks), stand_in(item.node.meta["val"])
    recorder, operations = Recorder(), {}
    words = like.new_empty(like.shape[:-1], dtype=torch.long)
    with recorder, torch.no_grad():
        torch.nn.functional.embedding(words, weight).mul_(like.new_empty(*like.shape[:-1], 1))
        operations["embed"] = recorder.take()
        gradient = (like * like.new_empty(*like.shape[:-1], 1)).reshape(-1, like.shape[-1])
        torch.empty_like(weight).index_add_(0, words.reshape(-1), gradient)
        operations["embed_backward"] = recorder.take()
    return operations


def _piece_of(graph: Graph, name: str, ranks: int) -> Tensor:
    """A stand-in for a rank's piece of a tensor."""
    piece = _piece(graph.by_name[name], ranks)
    made: Tensor = stand_in(torch.empty(piece.shape, dtype=piece.dtype, device="meta"))
    return made


def _saved(graph: Graph, head: VocabularyHead, ranks: int) -> int:
    """Bytes of a micro-batch from S to T, without x: P', and some numbers for each row.

    Where the logits are functions of the product and labels are smoothed, also the derivatives.
    """
    itemsize = graph.by_name[head.weight].dtype.itemsize
    matrices = 2 if head.logits is not None and head.loss.label_smoothing else 1
    numbers = 4 * max(4, itemsize) + 8 + 2  # statistics, the label's row, two masks
    count = int(head.x.meta["val"].shape[0])
    return matrices * _matrix(graph, head, ranks) + count * numbers


def _matrix(graph: Graph, head: VocabularyHead, ranks: int) -> int:
    """Bytes of P', whose memory the next micro-batch reuses (`runtime.head.MatrixPool`)."""
    weight = _piece(graph.by_name[head.weight], ranks)
    return int(head.x.meta["val"].shape[0] * weight.shape[0] * weight.dtype.itemsize)


def _widened(graph: Graph, head: VocabularyHead, ranks: int) -> int:
    """Bytes of 16-bit logits widened for the softmax, in blocks of rows (`runtime.softmax`)."""
    weight = _piece(graph.by_name[head.weight], ranks)
    if weight.dtype.itemsize >= torch.float32.itemsize:
        return 0
    elements = head.x.meta["val"].shape[0] * weight.shape[0]
    return torch.float32.itemsize * min(BLOCK, int(elements))


def _collectives(
    graph: Graph, ranks: RankGroup, method: str, device: Device, everywhere: bool
) -> dict[str, float]:
    """Seconds of the collectives of a micro-batch among all ranks."""
    assert graph.vocabulary is not None
    head, lookups = graph.vocabulary.head, graph.vocabulary.lookups
    added = "all-reduce" if everywhere else "reduce"

    def time_of(action: str, nbytes: float) -> float:
        return collective.seconds(action, nbytes, ranks, device)

    parts = {
        "embed_reduce": sum(time_of(added, nbytes_of(item.node)) for item in lookups),
        "embed_broadcast": sum(time_of("broadcast", nbytes_of(item.node)) for item in lookups),
        "broadcast": 0.0,
        "reduce": 0.0,
        "exchange": 0.0,
    }
    if head is not None:
        nbytes, count = nbytes_of(head.x), head.x.meta["val"].shape[0]
        each = count * max(4, graph.by_name[head.weight].dtype.itemsize)
        parts["broadcast"], parts["reduce"] = time_of("broadcast", nbytes), time_of(added, nbytes)
        if method in ASKS_FIRST:
            parts["exchange"] = time_of("all-reduce", each)
        else:
            parts["exchange"] = time_of("all-gather", 3 * each * ranks.size)
    return parts
