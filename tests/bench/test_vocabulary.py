"""The passes of a spread vocabulary on one rank: what is timed is what a step computes."""

from __future__ import annotations

import time
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parcompiler.bench import vocabulary
from parcompiler.bench.vocabulary import HeadPasses, LookupPasses, RandomData, time_passes
from parcompiler.capture import capture
from parcompiler.cost import times
from parcompiler.graph import EmbeddingLookup, Graph, VocabularyHead
from parcompiler.options import METHODS
from tests.vocabulary.endings import SPREAD, V, case
from tests.vocabulary.running import everything

CPU = torch.device("cpu")


@cache
def spread(ending: str, ranks: int) -> Graph:
    model, inputs = case(SPREAD[ending])
    return everything(capture(model, inputs), ranks)


def layers(graph: Graph) -> tuple[VocabularyHead, EmbeddingLookup]:
    """The head and the only embedding."""
    assert graph.vocabulary is not None
    assert graph.vocabulary.head is not None
    (item,) = graph.vocabulary.lookups
    return graph.vocabulary.head, item


def eager(passes: HeadPasses, head: VocabularyHead) -> Tensor:
    """The loss of the micro-batch, for one rank that has all rows."""
    rows = passes.head
    bias = None if rows.bias is None else rows.bias.view(-1)
    logits = F.linear(passes.x, rows.weight, bias)
    if head.logits is not None:
        logits = vocabulary.function_of(head.logits)(logits)
    found = F.cross_entropy(
        logits,
        passes.targets,
        rows.class_weight if head.class_weight else None,
        ignore_index=head.loss.ignore_index,
        label_smoothing=head.loss.label_smoothing,
        reduction=head.loss.reduction,
    )
    return head.loss.scale * found


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("ending", SPREAD)
def test_the_passes_of_one_rank_with_all_rows_are_those_of_the_loss(
    ending: str, method: str
) -> None:
    graph = spread(ending, 1)
    head, _ = layers(graph)
    passes = HeadPasses(RandomData(graph, 1, CPU), head, method)
    passes.sample(time.perf_counter)
    held = (passes.head.weight, passes.head.bias)
    trained = [item for item in held if isinstance(item, nn.Parameter) and item.requires_grad]
    wanted = torch.autograd.grad(eager(passes, head), trained)
    for item, gradient in zip(trained, wanted, strict=True):
        assert item.grad is not None
        assert torch.allclose(item.grad, gradient, rtol=1e-9, atol=1e-12)


def test_a_lookup_adds_to_its_own_rows() -> None:
    graph = spread("plain", 2)
    _, item = layers(graph)
    passes = LookupPasses(RandomData(graph, 2, CPU), item)
    passes.sample(time.perf_counter)
    assert passes.weight.grad is not None
    assert passes.weight.shape[0] == V // 2
    touched = passes.weight.grad.abs().sum(1) > 0
    words = passes.words[passes.words < V // 2]
    assert set(touched.nonzero().flatten().tolist()) == set(words.tolist())


@pytest.mark.parametrize("method", METHODS)
def test_only_methods_that_ask_for_the_largest_take_time_to_normalize(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FEWEST", "MOST", "WARM"):
        monkeypatch.setattr(times, name, 1)
    found = time_passes(spread("plain", 2), 2, method, CPU)
    assert found.method == method
    assert min(found.s, found.t, found.embed, found.embed_backward) > 0
    assert (found.normalize > 0) is (method in ("naive", "interlaced"))
