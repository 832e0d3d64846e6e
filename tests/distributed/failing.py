"""Runs one way to fail per name and prints what each rank raised, as JSON."""

import json
import os
import tempfile
import time
from collections.abc import Callable

import torch

import parcompiler as pc
from tests import zoo


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, zoo.VOCABULARY, (4, zoo.LENGTH), generator=torch.Generator())
    return {"tokens": ids, "labels": ids}


def fail(way: str, worker: pc.Worker) -> None:
    good = batch()
    worker.train_step(good)
    if way == "missing key on rank 1" and worker.rank == 1:
        worker.train_step({"tokens": good["tokens"]})
    if way == "wrong dtype on rank 0" and worker.rank == 0:
        worker.train_step({**good, "tokens": good["tokens"].int()})
    if way == "too many rows on rank 1" and worker.rank == 1:
        worker.train_step({key: torch.cat([t, t[:1]]) for key, t in good.items()})
    if way == "label out of range":
        good["labels"] = good["labels"] + zoo.VOCABULARY
    if way == "exception in a module on rank 0" and worker.rank == 0:
        worker.stages[0].register_forward_pre_hook(explode)
    if way == "a batch more than rank 1" and worker.rank == 1:
        return
    if way == "an evaluation on rank 0" and worker.rank == 0:
        worker.evaluate(good)
        return
    if way == "gather on rank 0" and worker.rank == 0:
        worker.gather_state_dict()
    if way == "save on rank 0, evaluations elsewhere":
        with tempfile.TemporaryDirectory() as folder:
            worker.evaluate(good) if worker.rank else worker.save(folder)
    if way == "a question of rank 0 alone":
        assert worker.rank or not worker.any_rank(False), "nobody said so"
        worker.evaluate(good)
    if way == "a loader that fails on rank 1" and worker.rank == 1:
        message = "no such file"
        raise OSError(message)
    worker.train_step(good)


def explode(*_: object) -> None:
    message = "boom"
    raise ValueError(message)


def main(folder: str, *ways: str, fail: Callable[[str, pc.Worker], None] = fail) -> None:
    rank = int(os.environ["RANK"])
    for way in ways:
        start = time.perf_counter()
        raised = ""
        worker = pc.load(folder).worker()
        worker.set_optimizer(torch.optim.SGD, lr=0.1)
        try:
            with worker:
                fail(way, worker)
        except (pc.ParcompilerError, OSError) as error:
            raised = f"{type(error).__name__}: {error}"
        seconds = time.perf_counter() - start
        answer = {"rank": rank, "way": way, "raised": raised, "s": seconds}
        os.write(1, f"{json.dumps(answer)}\n".encode())  # at once: two ranks share the output
