"""Two data ranks that do not wait for each other: hooks of an optimizer, options, and a rank that
does not close. The main of forked ranks."""

import atexit
import threading
import time

import torch

import parcompiler as pc
from tests.runtime.workers import batch, mixed

TIMEOUT = 3.0


def started() -> pc.Worker:
    model = mixed()
    model.norm = torch.nn.BatchNorm1d(6, track_running_stats=False)
    program = pc.compile(
        model, pc.Mesh(data=2), batch(1), microbatches=1, updates="asynchronous", progress=False
    )
    return program.worker(timeout=TIMEOUT)


def unclosed() -> None:
    """Rank 0 prints the threads that are left when the interpreter ends."""
    worker = started()
    worker.set_optimizer(torch.optim.SGD, lr=0.1)
    worker.train_step(batch(1))
    if worker.rank == 1:
        time.sleep(TIMEOUT)
        return
    atexit._run_exitfuncs()
    names = sorted(thread.name for thread in threading.enumerate())
    print("left:", *(name for name in names if name in ("server", "bell")))


def ranks() -> None:
    """Rank 0 prints what it saw of six updates, and how the end came."""
    worker = started()
    optimizer = worker.set_optimizer(torch.optim.Adafactor, lr=0.1)  # eps=(None, 0.001)
    seen = []

    def stop(one: torch.optim.Optimizer, *_: object) -> None:
        weights = [p for group in one.param_groups for p in group["params"]]
        seen.append(sum(p.grad is not None for p in weights))
        for weight in weights:
            weight.grad = None

    optimizer.register_step_pre_hook(stop)
    before = worker.gather_state_dict()
    for k in range(3):
        worker.train_step(batch(1, seed=k))
    after = worker.gather_state_dict()
    if worker.rank == 1:
        time.sleep(TIMEOUT + 3)  # open, and takes no step
        return
    assert before is not None and after is not None
    same = all(torch.equal(after[name], before[name]) for name in before)
    print(f"updates {len(seen)}, with gradients {sum(n > 0 for n in seen)}, unchanged {same}")
    try:
        worker.close()
    except pc.LaunchError as error:
        print(error)
