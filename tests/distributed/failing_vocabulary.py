"""As failing.py, with the vocabulary on all ranks: words that there are not, and failures."""

from functools import partial

import torch

import parcompiler as pc
from tests import zoo
from tests.distributed import failing


def fail(way: str, worker: pc.Worker) -> None:
    good = failing.batch()
    worker.train_step(good)
    bad = {key: tensor.clone() for key, tensor in good.items()}
    if way == "label too large on rank 1" and worker.rank == 1:
        bad["labels"][3, 4] = zoo.VOCABULARY
    if way == "negative label on all ranks":
        bad["labels"][0, 0] = -1
    if way == "word too large on rank 0" and worker.rank == 0:
        bad["tokens"][1, 2] = zoo.VOCABULARY + 5
    if way == "negative word on all ranks":
        bad["tokens"][0, 0] = -100
    if way == "label too large in an evaluation on rank 0":
        if worker.rank == 0:
            bad["labels"][0, 0] = zoo.VOCABULARY
        worker.evaluate(bad)
    if way == "exception in an exchange on rank 1" and worker.rank == 1:
        worker._channels.gathered = failing.explode  # type: ignore[method-assign,assignment]
    if way == "exception in a broadcast on rank 0" and worker.rank == 0:
        worker._channels.broadcast_value = failing.explode  # type: ignore[method-assign,assignment]
    if way == "connections closed in an exchange on rank 1" and worker.rank == 1:
        closing(worker)
    worker.train_step(bad)


def closing(worker: pc.Worker) -> None:
    """Let a rank close its connections where it comes to the exchange of a head."""

    def close(_: torch.Tensor) -> None:
        worker._channels.close()
        message = "closed"
        raise RuntimeError(message)

    worker._channels.gathered = close  # type: ignore[method-assign,assignment]


main = partial(failing.main, fail=fail)
