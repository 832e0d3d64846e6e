"""One rank fails: all ranks stop within seconds and say which one, where and why."""

import json

import pytest

import parcompiler as pc
from tests import zoo
from tests.distributed import failing, forked

# For each way to fail, what the rank that failed says and what the other one says.
WAYS = {
    "missing key on rank 1": (
        "InputError: the batch lacks 'labels' (it has: tokens; needed: labels, tokens)",
        "because rank 1 refused its batch: InputError: the batch lacks 'labels'",
    ),
    "wrong dtype on rank 0": (
        "InputError: batch['tokens'] must have dtype torch.int64 (torch.int32 given)",
        "because rank 0 refused its batch: InputError: batch['tokens']",
    ),
    "too many rows on rank 1": (
        "5 rows cannot be divided into 2 micro-batches",
        "because rank 1 refused its batch: InputError",
    ),
    "label out of range": (
        "LaunchError: rank {last} failed at 'FORWARD stage {last} mb 0' in module",
        "because rank {last} failed at 'FORWARD stage {last} mb 0' in module",
    ),
    "exception in a module on rank 0": (
        "LaunchError: rank 0 failed at 'FORWARD stage 0 mb 0'",
        "because rank 0 failed at 'FORWARD stage 0 mb 0': ValueError: boom",
    ),
    "a batch more than rank 1": (
        "because rank 1 left after call 1 (step) (its worker was closed), while ",
        "every rank must make the same calls in the same order",
    ),
    "an evaluation on rank 0": (
        "LaunchError: rank 1 ",
        "ranks make different calls (call 2 is evaluate on rank 0 and step on rank ",
    ),
    "gather on rank 0": (
        "LaunchError: rank 1 stopped ",
        "because ranks make different calls (call 2 is gather on rank 0 and step on rank ",
    ),
    "save on rank 0, evaluations elsewhere": (
        "LaunchError: rank 1 stopped ",
        "because ranks make different calls (call 2 is save on rank 0 and evaluate on rank ",
    ),
    "a question of rank 0 alone": (
        "LaunchError: rank 0 stopped ",
        "ranks make different calls: every rank must make the same calls in the same order",
    ),
    "a loader that fails on rank 1": (
        "OSError: no such file",
        "because rank 1 left its worker because of OSError: no such file",
    ),
}


@pytest.fixture(scope="module", params=[2, 4], ids="{} ranks".format)
def ranks(request: pytest.FixtureRequest) -> int:
    """With four of them, ranks that stop for a neighbour stop the next."""
    number: int = request.param
    return number


@pytest.fixture(scope="module")
def raised(ranks: int, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, str]]]:
    """What each rank raised, for each way to fail."""
    model, inputs = zoo.build("gpt")
    program = pc.compile(model, pc.Mesh(pipeline=ranks), inputs, microbatches=2)
    folder = program.export(tmp_path_factory.mktemp("failing") / "out")
    text = forked.run(ranks, failing.main, str(folder), *WAYS)
    found: dict[str, list[dict[str, str]]] = {way: [] for way in WAYS}
    for line in text.splitlines():
        if line.startswith("{"):
            answer = json.loads(line)
            found[answer["way"]].append(answer)
    return found


@pytest.mark.parametrize("way", WAYS)
def test_all_ranks_stop_and_name_the_cause(
    way: str, ranks: int, raised: dict[str, list[dict[str, str]]]
) -> None:
    own, others = (text.format(last=ranks - 1) for text in WAYS[way])
    texts = [answer["raised"] for answer in raised[way]]
    assert len(texts) == ranks
    assert any(own in text for text in texts), texts
    assert any(others in text for text in texts), texts
    assert all(float(answer["s"]) < 20 for answer in raised[way])
