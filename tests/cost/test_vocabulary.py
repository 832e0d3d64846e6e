"""What a rank does for the vocabulary: products by their sizes, bytes by hand."""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest
import torch

from parcompiler.capture import capture
from parcompiler.cost import vocabulary
from parcompiler.cost.vocabulary import vocabulary_parts
from parcompiler.device import Device, Link, device
from parcompiler.graph import Graph, Parameter
from parcompiler.models import gpt
from parcompiler.vocabulary import find, spread

ASKING_AND_NOT = ("interlaced", "vocab-2")
V, HIDDEN, TOKENS, RANKS = 1000, 64, 32, 4
OWN = 250
PRODUCT = 2 * TOKENS * HIDDEN * OWN


@cache
def model(*, tied: bool = False, half: bool = False) -> Graph:
    """A GPT without data, its vocabulary spread."""
    config = gpt.Config(layers=1, heads=2, hidden=HIDDEN, vocabulary=V, sequence=TOKENS, tied=tied)
    with torch.device("meta"):
        made = gpt.GPT(config)
    if half:
        made = made.half()
    tokens = torch.zeros(1, TOKENS, dtype=torch.long)
    whole = capture(made, {"tokens": tokens, "labels": tokens})
    found = find(whole, RANKS)
    assert found.head is not None
    return spread(whole, {*found.tables, found.head.weight}, RANKS)


def arithmetic() -> Device:
    """A device that takes a second for each FLOP of a product, and next to none for others."""
    fast = dataclasses.replace(
        device("cpu"),
        flops=(("float32", 1e12),),
        memory_bandwidth=1e30,
        launch_overhead=0.0,
        link=Link(bandwidth=1e30, latency=0.0),
    )
    efficiency = dataclasses.replace(fast.efficiency, matmul=1e-12, other=1.0)
    return dataclasses.replace(fast, efficiency=efficiency)


def state(item: Parameter) -> int:
    return 16 * item.numel


@pytest.mark.parametrize(
    ("method", "s", "normalize", "t"),
    [("naive", 1, 0, 2), ("interlaced", 1, 0, 2), ("vocab-1", 1, 0, 2), ("vocab-2", 2, 0, 1)],
)
def test_every_method_has_three_products(method: str, s: int, normalize: int, t: int) -> None:
    found = vocabulary_parts(model(), RANKS, method, arithmetic(), state)
    assert found["s"] == pytest.approx(s * PRODUCT, rel=1e-6)
    assert found["normalize"] == pytest.approx(normalize * PRODUCT, abs=1e-3)
    assert found["t"] == pytest.approx(t * PRODUCT, rel=1e-6)


def test_only_methods_that_ask_for_the_largest_normalize() -> None:
    cpu = device("cpu")
    for method in ("naive", "interlaced", "vocab-1", "vocab-2"):
        found = vocabulary_parts(model(), RANKS, method, cpu, state)
        assert (found["normalize"] > 0) == (method in ("naive", "interlaced"))


def test_bytes_are_those_of_the_piece() -> None:
    found = vocabulary_parts(model(), RANKS, "vocab-2", device("cpu"), state)
    assert found["resident"] == 2 * 16 * OWN * HIDDEN
    assert found["x_bytes"] == found["embedded_bytes"] == 4 * TOKENS * HIDDEN
    vectors = found["saved"] - 4 * TOKENS * OWN
    assert 0 < vectors <= 32 * TOKENS


def test_16_bits_are_widened_for_the_softmax_of_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    wide, narrow = (
        {m: vocabulary_parts(graph, RANKS, m, device("a100-80g"), state) for m in ASKING_AND_NOT}
        for graph in (model(), model(half=True))
    )
    assert all(found["more"] == 0 for found in wide.values())
    assert all(found["more"] == 4 * TOKENS * OWN for found in narrow.values())
    monkeypatch.setattr(vocabulary, "BLOCK", 100)
    assert vocabulary_parts(model(half=True), RANKS, "vocab-1", device("cpu"), state)["more"] == 400


@pytest.mark.parametrize(("method", "where"), [("vocab-1", "s"), ("naive", "normalize")])
def test_widening_and_narrowing_take_their_bytes(method: str, where: str) -> None:
    on = dataclasses.replace(
        arithmetic(), flops=(("float32", 1e30), ("float16", 1e30)), memory_bandwidth=1.0
    )
    exact = dataclasses.replace(
        on, efficiency=dataclasses.replace(on.efficiency, bandwidth=1.0, matmul=1.0)
    )
    logits = TOKENS * OWN
    took = vocabulary_parts(model(half=True), RANKS, method, exact, state)[where]
    product = 2 * (TOKENS * HIDDEN + HIDDEN * OWN + logits) if method == "vocab-1" else 0
    # To float32 and back 6 each; the softmax reads and writes 4, two maxima read 4 each.
    rows = 2 * 4 * TOKENS  # the maxima
    assert took == product + (6 + 8 + 4 + 4 + 6) * logits + rows


def test_a_tied_table_is_held_once() -> None:
    found = vocabulary_parts(model(tied=True), RANKS, "vocab-2", device("cpu"), state)
    assert found["resident"] == 16 * OWN * HIDDEN


def test_collectives_take_the_time_of_the_link() -> None:
    on = dataclasses.replace(device("cpu"), link=Link(bandwidth=1.0, latency=0.0))
    found = vocabulary_parts(model(), RANKS, "vocab-2", on, state)
    nbytes = 4 * TOKENS * HIDDEN
    assert found["broadcast"] == found["reduce"] == found["embed_broadcast"] == nbytes
    assert found["exchange"] == 3 * 4 * TOKENS * (RANKS - 1)
    everywhere = vocabulary_parts(model(), RANKS, "vocab-2", on, state, everywhere=True)
    assert everywhere["reduce"] == pytest.approx(2 * nbytes * (RANKS - 1) / RANKS)
    assert everywhere["broadcast"] == nbytes
