"""Ranks that are not given the same: prints what each way does on each rank, as JSON.

The folder has `out`, `other` with other weights, `tied` and `tensor`.
"""

import json
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

import parcompiler as pc
from tests import zoo

ROWS, MICROBATCHES = 2, 2
Batch = dict[str, torch.Tensor]


def batch(seed: int, microbatches: int = MICROBATCHES) -> Batch:
    """Tokens of a data coordinate."""
    generator = torch.Generator().manual_seed(seed)
    shape = (ROWS * microbatches, zoo.LENGTH)
    ids = torch.randint(0, zoo.VOCABULARY, shape, generator=generator)
    return {"tokens": ids, "labels": ids}


class Case:
    """The ways; `said` collects what a rank is told, `odd` is the rank that is given others."""

    def __init__(self, folder: Path) -> None:
        self.rank = int(os.environ["RANK"])
        self.odd = self.rank == 1
        self.folder = folder
        self.said: list[str] = []

    def attempt(self, call: Callable[..., object], *arguments: object) -> None:
        try:
            found = call(*arguments)
        except pc.ParcompilerError as error:
            found = f"{type(error).__name__}: {error}"
        self.said.append(f"{float(found)}" if isinstance(found, torch.Tensor) else str(found))

    def own(self, worker: pc.Worker, seed: int = 0, microbatches: int = MICROBATCHES) -> Batch:
        """The good batch of this rank."""
        return batch(10 * seed + worker.program.coordinate.data, microbatches)

    def started(self, folder: Path) -> None:
        def start() -> torch.Tensor:
            with pc.load(folder).worker() as worker:
                return worker.step(self.own(worker))

        self.attempt(start)

    def copied(self) -> Path:
        """A folder of this rank alone."""
        target = self.folder / f"rank_{self.rank}"
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(self.folder / "out", target)
        return target

    def a_script_edited_on_one_rank(self) -> None:
        folder = self.copied()
        if self.odd:
            script = folder / "stage_0.py"
            script.write_text(f"{script.read_text()}\n# mine\n")
        self.started(folder)

    def a_script_edited_on_all_ranks(self) -> None:
        folder = self.copied()
        script = folder / "stage_1.py"
        script.write_text(f"{script.read_text()}\n# ours\n")
        self.started(folder)

    def an_export_of_other_weights(self) -> None:
        self.started(self.folder / ("other" if self.odd else "out"))

    def a_damaged_weight(self) -> None:
        folder = self.copied()
        if self.odd:
            path = folder / "weights" / "stage_0.safetensors"
            raw = bytearray(path.read_bytes())
            raw[-1] ^= 1
            path.write_bytes(raw)
        self.started(folder)

    def another_batch(self) -> None:
        with pc.load(self.folder / "out").worker() as worker:
            worker.check_batches = 2
            good, bad = self.own(worker), self.own(worker, 1 if self.rank == 2 else 0)
            self.attempt(worker.step, bad)
            self.attempt(worker.step, good)
            worker.step(bad)  # not compared
            self.attempt(worker.step, bad)

    def another_learning_rate(self) -> None:
        with pc.load(self.folder / "out").worker() as worker:
            worker.check_batches = 2
            optimizer = worker.set_optimizer(torch.optim.AdamW, lr=0.1)
            good = self.own(worker)
            worker.train_step(good)
            optimizer.param_groups[0]["lr"] = 0.05 if self.odd else 0.1
            worker.train_step(good)  # not compared
            self.attempt(worker.train_step, good)
            optimizer.param_groups[0]["lr"] = 0.1
            self.attempt(worker.train_step, good)

    def a_batch_refused_by_one_rank(self) -> None:
        with pc.load(self.folder / "out").worker() as worker:
            good = self.own(worker)
            bad = {"tokens": good["tokens"]} if self.odd else good
            self.attempt(worker.step, bad)
            self.attempt(worker.step, good)
            if self.odd:
                self.attempt(worker.step, bad)  # the others wait
                self.said.pop()
            self.attempt(worker.step, good)
            self.attempt(worker.step, bad)  # and give up when it does

    def evaluations_of_fewer(self) -> None:
        with pc.load(self.folder / "out").worker() as worker:
            fewer = self.own(worker, microbatches=1)
            self.attempt(worker.evaluate, self.own(worker) if self.odd else fewer)
            self.attempt(worker.evaluate, fewer)

    def loaded(self, name: str, other: bool, *tensors: str) -> None:
        """Step with a tensor that is another on some ranks, with the same again, and onwards."""
        state = zoo.build("gpt-tied" if name == "tied" else "gpt")[0].state_dict()
        with pc.load(self.folder / name).worker() as worker:
            worker.set_optimizer(torch.optim.SGD, lr=0.1)
            bad = {n: state[n] + 1 for n in tensors if other}
            worker.load_state_dict(state | bad)
            for call in (worker.evaluate, worker.step):
                self.attempt(call, self.own(worker))
            worker.load_state_dict(state)
            for _ in range(2):
                self.attempt(worker.train_step, self.own(worker))
            worker.load_state_dict(state | bad)
            self.attempt(worker.train_step, self.own(worker))

    def another_weight_on_one_data_rank(self) -> None:
        self.loaded("out", self.rank == 3, "head.weight")

    def another_weight_on_one_tensor_rank(self) -> None:
        self.loaded("tensor", self.odd, "layers.1.ffn_norm.weight", "layers.1.ffn.up.weight")

    def another_weight_on_one_pipeline_rank(self) -> None:
        self.loaded("tied", self.rank > 1, "embedding.weight", "head.weight")

    def another_seed_on_one_rank(self) -> None:
        torch.manual_seed(int(self.odd))
        inputs = (torch.ones(ROWS, 2),)
        model = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Flatten(0))
        mesh = pc.Mesh(data=4)
        program = pc.compile(model, mesh, inputs, microbatches=1, loss=torch.mean)
        with program.worker() as worker:
            self.attempt(worker.step, inputs)
            worker.load_state_dict({"0.weight": torch.ones(1, 2), "0.bias": torch.zeros(1)})
            self.attempt(worker.step, inputs)

    def a_loss_that_is_not_finite(self) -> None:
        with pc.load(self.folder / "out").worker() as worker:
            worker.set_optimizer(torch.optim.SGD, lr=1e30, error_if_nonfinite=True)
            for _ in range(3):
                self.attempt(worker.train_step, self.own(worker))


WAYS = [name for name in vars(Case) if name.startswith(("a_", "an_", "another_", "evaluations_"))]


def main(folder: str) -> None:
    warnings.simplefilter("ignore")
    for way in WAYS:
        case = Case(Path(folder))
        getattr(case, way)()
        answer = {"rank": case.rank, "way": way, "said": case.said}
        os.write(1, f"{json.dumps(answer)}\n".encode())  # at once: ranks share the output
