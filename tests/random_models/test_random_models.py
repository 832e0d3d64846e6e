"""Random models under random options train on their ranks as in a plain loop in one process.

A few of them are in the suite. `make random` runs as many as are wanted:

    make random CASES=500 FIRST=0 PROCESSES=2

With `COMPILED=1` their layers are compiled, which takes ten times as long.
"""

import dataclasses
import multiprocessing
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.random_models import plain
from tests.random_models.generator import OPEN, Case, draw
from tests.random_models.reducing import reduced
from tests.random_models.running import Ranks, Verdict, ranks, run
from tests.random_models.statements import TEMPLATES

FEW = (2, 4, 6, 17, 26, 35, 59, 79, 88, 238, 394)  # on at most two ranks, together of most kinds
MOST_REFUSED = 0.25
REFUSED = {"tensor hook", "backward hook", "Python state"}  # by name, whatever else is in the model

Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def own() -> Iterator[Ranks]:
    """The processes that run the ranks of all cases."""
    with ranks() as processes:
        yield processes


@pytest.mark.parametrize("number", FEW)
def test_a_random_model_trains_as_in_the_plain_loop(number: int, own: Ranks) -> None:
    case = draw(number)
    verdict = run(case, own)
    assert verdict.kind == "passed", f"{verdict.text}\n\n{case.source()}"


def test_a_number_stands_for_one_case() -> None:
    assert draw(3).source() == draw(3).source() != draw(4).source()


# ------------------------------------------------------------------- that a fault would be seen


class Small(nn.Module):
    """Two layers with dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.4)
        self.second = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.second(self.drop(self.first(x).tanh())).square().mean()
        return loss


def small(**options: Any) -> Any:
    """A case of one's own: `Small` on two stages."""

    def build() -> tuple[nn.Module, None]:
        torch.manual_seed(0)
        return Small(), None

    training = {"optimizer": "SGD", "options": {"lr": 0.1}, "max_norm": None, "steps": 2}
    return SimpleNamespace(
        build=build, INPUTS={"x": ("float", 8, 8)}, POSITIONAL=False, TRAINING=training,
        DTYPE="float32" if "precision" in options else "float64", MESH={"pipeline": 2},
        OPTIONS={"microbatches": 4, "stages": (1, 1), "schedule": "1f1b"} | options,
    )  # fmt: skip


def another_gradient(results: Results) -> None:
    results[0]["gradients"]["second.weight"][0] *= 1 + 1e-6


def no_gradient(results: Results) -> None:
    del results[0]["gradients"]["second.weight"]


def another_mask(results: Results) -> None:
    mask = next(rank["drawn"][0]["value"] for rank in results if rank["drawn"])
    mask[0, 0] = 1 - mask[0, 0]


def the_same_mask(results: Results) -> None:
    first, second, *_ = next(rank["drawn"] for rank in results if rank["drawn"])
    second["value"] = first["value"]


def later_updates(results: Results) -> None:
    results[1]["pipeline"] = 0


def half_a_gradient(results: Results) -> None:
    results[0]["gradients"]["first.weight"] *= 0.5


def another_weight(results: Results) -> None:
    results[0]["state"]["first.bias"] += 0.05


@pytest.mark.parametrize(
    ("options", "mistakes"),
    [
        (
            {},
            {
                another_gradient: "gradients second.weight",
                no_gradient: "only the plain loop has it",
                another_mask: "gradients first",
                the_same_mask: "chance",
            },
        ),
        ({"schedule": "pipedream"}, {later_updates: "state second"}),
        (
            {"precision": "bf16"},
            {half_a_gradient: "gradients first", another_weight: "state first"},
        ),
    ],
    ids=("float64 with dropout", "pipedream", "bf16"),
)
def test_a_mistake_of_the_ranks_is_seen(
    options: dict[str, Any],
    mistakes: dict[Callable[[Results], None], str],
    own: Ranks,
    tmp_path: Path,
) -> None:
    case = small(**options)
    size = plain.written(case, tmp_path)
    assert own.run(tmp_path, size) == ""
    assert plain.compared(case, tmp_path, size) == []
    files = [tmp_path / f"rank_{rank}.pt" for rank in range(size)]
    texts = [file.read_bytes() for file in files]
    for mistake, words in mistakes.items():
        for file, text in zip(files, texts, strict=True):
            file.write_bytes(text)
        results = [torch.load(file, weights_only=True) for file in files]
        mistake(results)
        for file, result in zip(files, results, strict=True):
            torch.save(result, file)
        faults = plain.compared(case, tmp_path, size)
        assert any(words in fault for fault in faults), f"{mistake.__name__}: {faults}"


@pytest.mark.parametrize(
    ("zigzag", "pieces"),
    [
        (False, ([0, 1, 2, 5, 6, 7, 8], [3, 4, 9, 10, 11])),
        (True, ([0, 1, 4, 5, 6, 11], [2, 3, 7, 8, 9, 10])),
    ],
)
def test_what_ranks_draw_of_segments_is_put_together(
    zigzag: bool, pieces: tuple[list[int], list[int]]
) -> None:
    """Of a dimension with segments of 5 and 7."""
    split = 1, (5, 7), zigzag
    line = [(rank, torch.tensor([piece]), split) for rank, piece in enumerate(pieces)]
    (whole,) = plain._in_order(line)
    assert whole.tolist() == [[*range(12)]]


def test_a_failure_is_reduced_to_what_it_takes() -> None:
    case = next(case for case in map(draw, range(50)) if "norm" in kinds_of(case))
    found = reduced(case, lambda other: "norm" in kinds_of(other))
    assert sum(len(body.statements) for body in found.bodies) < 4
    assert found.mesh == {} and found.options == {"microbatches": 1}


def kinds_of(case: Case) -> str:
    """The text of a case that is a model."""
    return case.source()


def test_a_script_runs_by_itself(tmp_path: Path) -> None:
    path = tmp_path / "random_model.py"
    case = dataclasses.replace(draw(FEW[0]), mesh={}, options={"microbatches": 2})
    path.write_text(case.script())
    found = subprocess.run([sys.executable, path], capture_output=True, text=True, cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    assert found.stdout == "the ranks train as the plain loop does\n"


# --------------------------------------------------------------------------------- the sweep


@pytest.mark.sweep
def test_many_random_models_train_as_in_the_plain_loop() -> None:
    count = int(os.environ.get("CASES", "500"))
    first = int(os.environ.get("FIRST", "0"))
    processes = int(os.environ.get("PROCESSES", "2"))
    begin = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as executor:
        numbers = range(first, first + count)
        verdicts = dict(zip(numbers, executor.map(judged, numbers), strict=True))
    print(f"\n{count} random models in {time.perf_counter() - begin:.0f} s:")
    for kind, times in Counter(v.kind for v, _ in verdicts.values()).most_common():
        print(f"  {times:4d} {kind}")
    texts = [verdict.text for verdict, _ in verdicts.values() if verdict.kind == "refused"]
    refused = Counter(re.split(r"[('\n]", text)[0][:90] for text in texts)
    for text, times in refused.most_common():
        print(f"  {times:4d} refused: {text}")
    failures = [number for number, (verdict, _) in verdicts.items() if verdict.failed]
    assert not failures, f"cases that fail: {failures}"
    assert refused.total() <= MOST_REFUSED * count
    if count >= 500:
        passed = set().union(*(kinds for _, kinds in verdicts.values()))
        missing = {template.kind for template in TEMPLATES} - OPEN - REFUSED - passed
        assert not missing, f"no model that passes has {missing}"


_processes: list[Ranks] = []  # of this process of a sweep
_reduced: set[str] = set()  # kinds of failures that it has reduced a case of


def judged(number: int) -> tuple[Verdict, set[str]]:
    """What becomes of a case, and the kinds of statements in it if it passes; prints failures.

    The first failure of a kind is reduced, which takes a minute or two.
    """
    if not _processes:
        _processes.append(Ranks())
    case = draw(number)
    verdict = run(case, _processes[0])
    if verdict.failed:
        if verdict.kind not in _reduced:
            _reduced.add(verdict.kind)
            case = reduced(case, lambda other: run(other, _processes[0]).kind == verdict.kind)
        path = Path("build/random") / f"random_model_{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(case.script())
        print(
            f"case {number} fails: {verdict.text}\nwritten to {path}:\n{case.source()}", flush=True
        )
    return verdict, case.kinds if verdict.kind == "passed" else set()
