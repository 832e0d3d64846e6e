"""Processes of the pool: each reads jobs as JSON lines, and runs a rank or a measurement.

python -m parcompiler.verification.rank_process PIPES

started by `pool.Pool`; forks one process for each pair of file descriptors, one to read jobs from
and one for answers. A process ends when its pipe of jobs is closed.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import signal
import sys
import threading
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel

from parcompiler.bench.busy import TIMEOUT, measure
from parcompiler.loaded import load
from parcompiler.runtime.joining import OVERRIDE, backend_of
from parcompiler.runtime.rng import SeededDraws
from parcompiler.runtime.tensor_files import read, write
from parcompiler.runtime.worker import Worker


def main(pipes: list[tuple[int, int]]) -> None:
    """Fork the processes, and answer for each that dies."""
    importlib.import_module("torch._dynamo")  # the first optimizer would: once for all forks
    torch.set_num_threads(1)
    answers: dict[int, int] = {}
    for number, (job_pipe, answer_pipe) in enumerate(pipes):
        pid = os.fork()
        if pid == 0:
            for end in (*answers.values(), *itertools.chain(*pipes[number + 1 :])):
                os.close(end)
            work(job_pipe, answer_pipe)
            os._exit(0)
        os.close(job_pipe)
        answers[pid] = answer_pipe
    threading.Thread(target=_end_with_owner, daemon=True).start()
    while answers:
        pid, status = os.wait()
        cause = f"exit code {os.waitstatus_to_exitcode(status)}"
        with suppress(BrokenPipeError):  # the pool is gone
            os.write(answers.pop(pid), json.dumps({"died": cause}).encode() + b"\n")


def _end_with_owner() -> None:
    """Kill this process and its forks when the pool's process ends without closing it: ranks that
    wait for each other on a GPU would occupy it for good."""
    os.read(0, 1)
    os.killpg(0, signal.SIGKILL)


def work(job_pipe: int, answer_pipe: int) -> None:
    """Answer every line of a pipe with a line on another."""
    os.dup2(2, 1)  # prints go to standard error
    jobs, answers = os.fdopen(job_pipe, encoding="utf-8"), os.fdopen(answer_pipe, "w")
    for line in jobs:
        job = json.loads(line)
        try:
            if "exchange" in job:
                measure(job["exchange"])
            else:
                _run(job)
            answer: dict[str, Any] = {"ok": True}
        except Exception as error:
            answer = {"ok": False, "kind": type(error).__name__, "text": str(error)}
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _run(job: dict[str, Any]) -> None:
    """The steps of one rank; rank 0 writes losses, norms, gradients and state."""
    rank, size = job["rank"], job["size"]
    _take_device(job["device"], rank, size)
    store, backend = dist.FileStore(job["store"], size), backend_of(torch.device(job["device"]))
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    with _attention(job), load(job["program"]).worker(compiled=job["compiled"] or None) as worker:
        evaluation = None
        if job["evaluate"]:  # the model draws nothing there
            evaluation = worker.evaluate(_batch(worker, job["batches"][0], 1))
        if job["draws"] is not None:
            worker.use_draws(lambda stage, i: SeededDraws(
                job["seed"], worker.program.microbatch(i), job["draws"][str(stage)]
            ))  # fmt: skip
        kind, options = getattr(torch.optim, job["optimizer"]), job["options"]
        worker.set_optimizer(kind, max_norm=job["max_norm"], **options)
        if job["scale"] is not None:
            worker.loss_scale = job["scale"]
        first, *others = (_batch(worker, path) for path in job["batches"])
        loss, gradients = _first_step(worker, first)
        losses, norms = [loss], [worker.gradient_norm]
        for batch in others:
            losses.append(worker.train_step(batch))
            norms.append(worker.gradient_norm)
        state = worker.gather_state_dict(everything=True)
        if rank == 0:
            assert state is not None
            known = [norm for norm in norms if norm is not None]
            numbers = {
                "losses": torch.stack(losses),
                "norms": torch.stack(known) if known else torch.zeros(0),
                "scale": torch.tensor(worker.loss_scale, dtype=torch.float64),
            }
            if worker.arrivals is not None:
                numbers["arrivals"] = worker.arrivals
            if evaluation is not None:
                numbers["evaluation"] = evaluation
            written = {"losses": numbers, "gradients": gradients or {}, "state": state}
            for name, tensors in written.items():
                on_cpu = {key: tensor.cpu() for key, tensor in tensors.items()}
                write(Path(job["out"]) / f"{name}.safetensors", on_cpu)


def _take_device(device: str, rank: int, size: int) -> None:
    """Set the device of this rank in the environment.

    NCCL refuses two ranks of one host on one device. If there are fewer devices than ranks, each
    rank poses as its own host, and messages go through sockets.
    """
    os.environ[OVERRIDE] = device
    if device != "cuda":
        return
    count = torch.cuda.device_count()
    os.environ["LOCAL_RANK"] = str(rank % count)
    if size > count:
        os.environ["NCCL_HOSTID"] = f"rank-{rank}"
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    torch.cuda.set_device(rank % count)
    torch.backends.cudnn.allow_tf32 = False  # float32 convolutions must round like the model's


def _attention(job: dict[str, Any]) -> AbstractContextManager[Any]:
    """Context in which attention drops the same elements as the model's: CUDA's fused kernels would
    draw by themselves."""
    drawn = job["draws"] is not None and job["device"] == "cuda"
    return sdpa_kernel(SDPBackend.MATH) if drawn else nullcontext()


def _first_step(
    worker: Worker, batch: object
) -> tuple[torch.Tensor, dict[str, torch.Tensor] | None]:
    """A step, and its gradients before they are used; None if the program does not keep them."""
    if worker.program.asynchronous:
        return worker.train_step(batch), None
    loss = worker.step(batch)
    gradients = worker.gather_gradients()
    worker.optimizer_step()
    return loss, gradients


def _batch(worker: Worker, path: str, microbatches: int | None = None) -> object:
    """The batch of this rank's data coordinate, or its first `microbatches`, from the file with
    those of all, in the form of the compiled inputs."""
    program = worker.program
    batch = dict(read(Path(path)))
    for spec in program.inputs.values():
        if spec.shape:
            first = program.batch * program.microbatches * spec.shape[0]
            rows = (microbatches or program.microbatches) * spec.shape[0]
            batch[spec.key] = batch[spec.key].narrow(0, first, rows)
    return program.in_form(batch)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
