"""The vocabulary on all ranks: legal programs pass, and each mistake in one is named."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from parcompiler.errors import InputError
from parcompiler.graph import EmbeddingLookup
from parcompiler.lower import Lowered
from parcompiler.lower.lowered import SpreadLayer
from parcompiler.prices import simulate_lowered
from parcompiler.runtime.program import of_first
from parcompiler.timeline import StageCost, VocabularyCost
from parcompiler.verifier import MemoryLimits, faults
from tests.verifier.edits import (
    dropped,
    edited,
    moved,
    rewritten,
    swapped,
    texts,
    with_stage,
    with_value,
)
from tests.verifier.oracle import same_meaning
from tests.verifier.words import METHODS, words

PLACES = (  # ranks, schedule, stages on a rank
    (2, "1f1b", 1),
    (4, "1f1b", 1),
    (2, "zb-h1", 1),
    (2, "v-half", 2),
    (2, "interleaved", 2),
)


@pytest.mark.parametrize("method", METHODS)
def test_a_legal_program_has_no_fault_and_does_what_the_model_does(method: str) -> None:
    for ranks, schedule, each in PLACES:
        for tied in (True, False):
            lowered = words(method, ranks, schedule, 3, each, tied=tied)
            assert texts(lowered) == []
            assert same_meaning(lowered)
    assert texts(words(method, data=2, tied=True)) == []


@pytest.mark.parametrize("method", METHODS)
def test_an_evaluation_of_fewer_micro_batches_has_no_fault(method: str) -> None:
    for ranks, schedule, each in PLACES:
        whole = words(method, ranks, schedule, 4, each, tied=True)
        for count in (1, 2, 3):
            lowered = words(method, ranks, schedule, count, each, tied=True)
            fewer = tuple(of_first(lines, count) for lines in whole.evaluation)
            assert texts(replace(lowered, evaluation=fewer)) == []


def _everywhere(lowered: Lowered, edit: Callable[[Lowered, int], Lowered]) -> Lowered:
    """The program after an edit of each rank."""
    for rank in range(lowered.size):
        lowered = edit(lowered, rank)
    return lowered


LINES: dict[str, tuple[str, Callable[[Lowered], Lowered]]] = {
    "rank 1 has no S mb 1": ("vocab-2", lambda x: dropped(x, 1, "S mb 1")),
    "rank 0 has no T mb 2": ("vocab-1", lambda x: dropped(x, 0, "T mb 2")),
    "rank 0 has no NORMALIZE mb 0": ("naive", lambda x: dropped(x, 0, "NORMALIZE mb 0")),
    "rank 1 has no EMBED embedding mb 2": (
        "vocab-2",
        lambda x: dropped(x, 1, "EMBED embedding mb 2"),
    ),
    "rank 0 has no EMBED_BACKWARD embedding mb 0": (
        "interlaced",
        lambda x: dropped(x, 0, "EMBED_BACKWARD embedding mb 0"),
    ),
    "rank 1 has no EXCHANGE sum mb 1": ("naive", lambda x: dropped(x, 1, "EXCHANGE sum mb 1")),
    "rank 0: NORMALIZE mb 0: 'vocab-1' has no such part": (
        "vocab-1",
        lambda x: edited(x, 0, lambda lines: lines.append("NORMALIZE mb 0")),
    ),
    "EXCHANGE maximum mb 0: 'vocab-2' exchanges statistics": (
        "vocab-2",
        lambda x: rewritten(x, 0, "EXCHANGE statistics mb 0", "EXCHANGE maximum mb 0"),
    ),
    "rank 0: BROADCAST embedding mb 0: embedding is looked up": (
        "vocab-2",
        lambda x: edited(x, 0, lambda lines: lines.append("BROADCAST embedding mb 0 from 0")),
    ),
    "rank 0: S mb 1 stands 2 times": (
        "vocab-2",
        lambda x: edited(x, 0, lambda lines: lines.append("S mb 1")),
    ),
    "rank 0: REDUCE norm.grad mb 1 to 0: stage 1 is on rank 1": (
        "vocab-2",
        lambda x: rewritten(x, 0, "REDUCE norm.grad mb 1 to 1", "REDUCE norm.grad mb 1 to 0"),
    ),
    "S mb 1 stands before BROADCAST norm mb 1 from 1": (
        "vocab-2",
        lambda x: moved(x, 0, "S mb 1", before="BROADCAST norm mb 1 from 1"),
    ),
    "T mb 0 stands before EXCHANGE statistics mb 0": (
        "vocab-2",
        lambda x: moved(x, 0, "T mb 0", before="EXCHANGE statistics mb 0"),
    ),
    "REDUCE norm.grad mb 0 to 1 stands before T mb 0": (
        "vocab-1",
        lambda x: moved(x, 0, "REDUCE norm.grad mb 0 to 1", before="T mb 0"),
    ),
    "BACKWARD stage 1 mb 0 stands before REDUCE norm.grad mb 0 to 1": (
        "vocab-2",
        lambda x: moved(x, 1, "BACKWARD stage 1 mb 0", before="REDUCE norm.grad mb 0 to 1"),
    ),
    "FORWARD stage 0 mb 0 stands before REDUCE embedding mb 0 to 0": (
        "vocab-2",
        lambda x: moved(x, 0, "FORWARD stage 0 mb 0", before="REDUCE embedding mb 0 to 0"),
    ),
    "BROADCAST norm mb 0 from 1 stands before FORWARD stage 1 mb 0": (
        "vocab-2",
        lambda x: moved(x, 1, "BROADCAST norm mb 0 from 1", before="FORWARD stage 1 mb 0"),
    ),
    "BROADCAST embedding.grad mb 0 from 0 stands before BACKWARD stage 0 mb 0": (
        "vocab-2",
        lambda x: moved(x, 0, "BROADCAST embedding.grad mb 0 from 0", "BACKWARD stage 0 mb 0"),
    ),
    "EMBED_BACKWARD embedding mb 1 stands before BROADCAST embedding.grad mb 1 from 0": (
        "vocab-2",
        lambda x: swapped(
            x, 1, "EMBED_BACKWARD embedding mb 1", "BROADCAST embedding.grad mb 1 from 0"
        ),
    ),
    "number 3 of the vocabulary is REDUCE embedding mb 2 on rank 0": (
        "vocab-2",
        lambda x: swapped(x, 1, "REDUCE embedding mb 2 to 0", "BROADCAST norm mb 0 from 1"),
    ),
    "SHARE_LOSS from 1 stands before EXCHANGE statistics mb 0": (
        "vocab-2",
        lambda x: moved(x, 1, "SHARE_LOSS from 1", before="EXCHANGE statistics mb 0"),
    ),
    "SHARE_LOSS from 0: the loss is on rank 1": (
        "vocab-2",
        lambda x: rewritten(x, 0, "SHARE_LOSS from 1", "SHARE_LOSS from 0"),
    ),
    "in evaluation, rank 0: T mb 0: there are no gradients": (
        "vocab-2",
        lambda x: edited(x, 0, lambda lines: lines.append("T mb 0"), evaluation=True),
    ),
    "in evaluation, rank 1 has no S mb 0": (
        "vocab-2",
        lambda x: dropped(x, 1, "S mb 0", evaluation=True),
    ),
}


@pytest.mark.parametrize("message", LINES)
def test_a_wrong_line_is_named(message: str) -> None:
    method, mistake = LINES[message]
    found = texts(mistake(words(method)))
    assert any(message in text for text in found), found


def test_ranks_that_wait_for_each_other_are_shown_with_what_they_wait_for() -> None:
    lowered = words("vocab-2")
    early = moved(lowered, 0, "S mb 0", before="SEND layers_0 mb 0 to 1")
    early = moved(early, 0, "BROADCAST norm mb 0 from 1", before="S mb 0")
    first = moved(early, 0, "REDUCE embedding mb 2 to 0", before="BROADCAST norm mb 0 from 1")
    first = moved(first, 0, "EMBED embedding mb 2", before="REDUCE embedding mb 2 to 0")
    (circle,) = [text for text in texts(first) if "no ranks wait" in text]
    assert "rank 0: S mb 0 (waits for rank 1: BROADCAST norm mb 0 from 1)" in circle
    assert "rank 1: FORWARD stage 1 mb 0 (waits for rank 0: SEND layers_0 mb 0 to 1)" in circle


def test_a_gradient_that_needs_an_exchange_holds_up_no_rank() -> None:
    """Rank 0 comes to S when rank 1 has taken what it sends, which is behind the gradient there."""
    lowered = words("vocab-2")
    receive = "RECV layers_0 mb 1 from 0"
    lowered = moved(lowered, 1, receive, before="RECV layers_0 mb 2 from 0")
    rank_0, rank_1 = ([*map(str, lines)] for lines in lowered.instructions)
    assert rank_0.index("SEND layers_0 mb 1 to 1") < rank_0.index("S mb 0")
    assert rank_1.index("REDUCE norm.grad mb 0 to 1") < rank_1.index(receive)
    assert texts(lowered) == []
    assert same_meaning(lowered)


TABLES: dict[str, Callable[[Lowered], Lowered]] = {
    "no stage runs embedding": lambda x: _with(x, lookups=()),
    "no stage runs cross_entropy_loss": lambda x: _with(x, head=None),
    "embedding is looked up 2 times": lambda x: _with(x, lookups=_lookups(x) * 2),
    "there is no method 'whole'": lambda x: _with(x, method="whole"),
    "head.weight is read and not held": lambda x: _with(x, tensors={"embedding.weight": 32}),
    "no stage holds head.weight": lambda x: _with(x, tensors={"embedding.weight": 32}),
    "embedding.weight has 31 rows": lambda x: _with(
        x, tensors=_tensors(x) | {"embedding.weight": 31}
    ),
    "norm.weight is held, and no layer of the vocabulary reads it": lambda x: _with(
        x, tensors=_tensors(x) | {"norm.weight": 8}
    ),
    "embedding takes labels from the batch, and its graph reads tokens": lambda x: _with(
        x, lookups=(replace(_lookups(x)[0], inputs=("labels",)),)
    ),
    "embedding goes to stage 1, which does not receive it": lambda x: _with(
        x, lookups=(replace(_lookups(x)[0], stage=1),)
    ),
    "the head takes norm from stage 0; stage 1 makes it": lambda x: _with(
        x,
        head=replace(x.vocabulary.head, stage=0),  # type: ignore[union-attr, type-var]
    ),
    "embedding.weight is on stages 0, and all ranks hold rows of it": lambda x: with_stage(
        x, 0, tensors=("embedding.weight", *x.stages[0].tensors)
    ),
    "it is on stage 1 and on all ranks": lambda x: with_stage(x, 1, loss="norm"),
    "all ranks take norm, which stage 1 does not give": lambda x: with_stage(x, 1, gives=()),
    "reads embedding, which all ranks make and stage 0 does not receive": lambda x: with_stage(
        x, 0, receives=()
    ),
    "norm goes from stage 1 to all ranks (listed from stage 1 to stage 0)": lambda x: with_value(
        x, "norm", consumers=(0,)
    ),
    "embedding goes from all ranks to stage 0 (listed from stage 1": lambda x: with_value(
        x, "embedding", producer=1
    ),
    "this step updates them after every backward": lambda x: replace(x, asynchronous=True),
    "S mb 0: no layer of the vocabulary is on all ranks": lambda x: replace(x, vocabulary=None),
}


def _with(lowered: Lowered, **changes: object) -> Lowered:
    assert lowered.vocabulary is not None
    return replace(lowered, vocabulary=replace(lowered.vocabulary, **changes))  # type: ignore[arg-type]


def _lookups(lowered: Lowered) -> tuple[SpreadLayer[EmbeddingLookup], ...]:
    assert lowered.vocabulary is not None
    return lowered.vocabulary.lookups


def _tensors(lowered: Lowered) -> dict[str, int]:
    assert lowered.vocabulary is not None
    return dict(lowered.vocabulary.tensors)


@pytest.mark.parametrize("message", TABLES)
def test_a_wrong_table_is_named(message: str) -> None:
    found = texts(TABLES[message](words("vocab-2")))
    assert any(message in text for text in found), found


@pytest.mark.parametrize("tied", [True, False])
def test_rows_are_in_one_bucket_of_every_rank_and_summed_when_they_are_final(tied: bool) -> None:
    lowered = words("vocab-2", data=2, tied=tied)
    mine = next(item for item in lowered.buckets if "embedding.weight" in item.names)
    line = f"REDUCE_GRADIENTS {mine.label} ranks 0"
    early = moved(lowered, 0, line, before="EMBED_BACKWARD embedding mb 2")
    assert any(f"{line} stands before EMBED_BACKWARD" in text for text in texts(early))
    others = tuple(item for item in lowered.buckets if item != mine)
    wrong = replace(lowered, buckets=others)
    assert any(
        "rows of embedding.weight on rank 0 are summed in no bucket" in text
        for text in texts(wrong)
    )
    twice = replace(lowered, buckets=(*lowered.buckets, replace(mine, label="bucket_9")))
    assert any("on rank 0 are summed 2 times" in text for text in texts(twice))
    both = replace(lowered, buckets=(*others, replace(mine, ranks=(0, 1))))
    assert any("and it is summed on ranks 0, 1" in text for text in texts(both))


@pytest.mark.parametrize("method", METHODS)
def test_memory_is_that_of_the_simulation_but_for_parts_that_wait_to_be_summed(method: str) -> None:
    cost = VocabularyCost(1.0, 1.0, 1.0, resident=77, saved=5000, reused=3000, method=method)
    for ranks, schedule, each in PLACES:
        lowered = words(method, ranks, schedule, 3, each)
        costs = [StageCost(1.0, 2.0, 1000, 10000 + 3 * j, 1.0) for j in range(ranks * each)]
        peaks = simulate_lowered(lowered, costs, vocabulary=cost).peak_memory
        part = lowered.values["embedding"].nbytes
        assert list(faults(lowered, MemoryLimits(costs, peaks, cost))) == []
        tight = [peak - part - 1 for peak in peaks]
        found = [str(fault) for fault in faults(lowered, MemoryLimits(costs, tight, cost))]
        assert [text[:24] for text in found] == [
            f"memory suffices: rank {rank} " for rank in range(ranks)
        ]


def test_the_vocabulary_needs_a_cost_where_memory_is_asked_for() -> None:
    lowered = words("vocab-2")
    with pytest.raises(InputError, match="of the vocabulary needs a cost"):
        list(faults(lowered, MemoryLimits([StageCost(1.0, 2.0, 0, 0)] * 2, [10**9] * 2)))
