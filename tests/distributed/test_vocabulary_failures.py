"""With the vocabulary on all ranks, too, all stop within seconds and say which failed and why."""

import json
from pathlib import Path

import pytest

import parcompiler as pc
from tests import zoo
from tests.distributed import failing_vocabulary, forked

LAST = zoo.VOCABULARY - 1
RANGE = f"must be from 0 to {LAST}"
LABEL = f"InputError: the labels of 'head.weight' {RANGE} or -100, which is ignored"
WORD = f"InputError: the words that 'embedding.weight' is asked for {RANGE}"
BEFORE = "refused its batch: "
EVERYWHERE = ""  # all ranks fail by themselves

# For each way to fail: what the rank that failed says, and what the other one says.
WAYS = {
    "label too large on rank 1": (
        f"{LABEL} ({LAST + 1} given)",
        f"because rank 1 {BEFORE}{LABEL}",
    ),
    "negative label on all ranks": (f"{LABEL} (-1 given)", EVERYWHERE),
    "word too large on rank 0": (f"{WORD} ({LAST + 6} given)", f"because rank 0 {BEFORE}{WORD}"),
    "negative word on all ranks": (f"{WORD} (-100 given)", EVERYWHERE),
    "label too large in an evaluation on rank 0": (
        f"{LABEL} ({LAST + 1} given)",
        "InputError: rank 0 refused its batch (its own error says why), so no rank has used this "
        "one",
    ),
    "exception in an exchange on rank 1": (
        "rank 1 failed at 'EXCHANGE statistics mb 0': ValueError: boom",
        "because rank 1 failed at 'EXCHANGE statistics mb 0': ValueError: boom",
    ),
    "exception in a broadcast on rank 0": (
        "rank 0 failed at 'BROADCAST norm mb 0 from 1': ValueError: boom",
        "because rank 0 failed at 'BROADCAST norm mb 0 from 1': ValueError: boom",
    ),
    "connections closed in an exchange on rank 1": (
        "rank 1 failed at 'EXCHANGE statistics mb 0'",
        "LaunchError: rank 0",
    ),
}
Raised = dict[str, list[dict[str, str]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program of two ranks."""
    model, inputs = zoo.build("gpt")
    program = pc.compile(
        model, pc.Mesh(pipeline=2), inputs, microbatches=2, schedule="1f1b", vocabulary="vocab-2"
    )
    return program.export(tmp_path_factory.mktemp("failing") / "out")


@pytest.fixture(scope="module")
def raised(folder: Path) -> Raised:
    """What each rank raised, for each way to fail."""
    text = forked.run(2, failing_vocabulary.main, str(folder), *WAYS)
    found: Raised = {way: [] for way in WAYS}
    for line in text.splitlines():
        if line.startswith("{"):
            answer = json.loads(line)
            found[answer["way"]].append(answer)
    return found


@pytest.mark.parametrize("way", WAYS)
def test_all_ranks_stop_and_name_the_cause(way: str, raised: Raised) -> None:
    own, others = WAYS[way]
    texts = [answer["raised"] for answer in raised[way]]
    assert len(texts) == 2
    assert all(float(answer["s"]) < 20 for answer in raised[way])
    saying = [own in text for text in texts]
    assert all(saying) if others == EVERYWHERE else any(saying), texts
    assert any(others in text for text in texts), texts
