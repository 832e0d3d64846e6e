"""One rank: training steps of a compiled program on text, its losses, and a run that is repeatable.

torchrun --nproc-per-node 2 rank.py PROGRAM OUT TEXT STEPS RATE, started by run.py
"""

import json
import sys
import time
from pathlib import Path

import torch

import parcompiler as pc
from parcompiler.models import gpt

SEQUENCE, ROWS = 64, 8  # of a data rank and step
HELD_OUT = 64  # rows that are evaluated


def model() -> gpt.GPT:
    """A model of bytes, with the same weights wherever it is made."""
    torch.manual_seed(0)
    sizes = {"vocabulary": 128, "sequence": SEQUENCE, "hidden": 64}
    return gpt.GPT(gpt.Config(layers=2, heads=4, tied=False, **sizes))


def rows(text: torch.Tensor, places: torch.Tensor) -> dict[str, torch.Tensor]:
    """Tokens and labels from some places on."""
    pieces = torch.stack([text[k : k + SEQUENCE + 1] for k in places.tolist()]).long()
    return {"tokens": pieces[:, :-1], "labels": pieces[:, 1:]}


def batch(text: torch.Tensor, step: int, rank: int) -> dict[str, torch.Tensor]:
    """What a data rank reads in a step, from the first nine tenths."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    last = len(text) * 9 // 10 - SEQUENCE - 1
    return rows(text, torch.randint(last, (ROWS,), generator=generator))


def held_out(text: torch.Tensor, k: int) -> dict[str, torch.Tensor]:
    """Rows that nobody trains on."""
    begin = len(text) * 9 // 10
    places = begin + torch.arange(HELD_OUT) * ((len(text) - begin - SEQUENCE - 1) // HELD_OUT)
    return rows(text, places[k * ROWS : (k + 1) * ROWS])


def main() -> None:
    """Train, evaluate, and write losses, seconds, arrivals and weights."""
    program, out, source, steps, rate = sys.argv[1:]
    text = torch.tensor(list(Path(source).read_bytes()), dtype=torch.uint8)
    with pc.load(program).worker() as worker:
        worker.set_optimizer(torch.optim.AdamW, lr=float(rate), max_norm=1.0)
        begin, losses, evaluated = time.perf_counter(), [], {}
        for step in range(int(steps)):
            losses.append(float(worker.train_step(batch(text, step, worker.data_rank))))
            if (step + 1) % 50 == 0:
                each = [worker.evaluate(held_out(text, k)) for k in range(HELD_OUT // ROWS)]
                evaluated[step + 1] = float(torch.stack(each).mean())
        seconds = time.perf_counter() - begin
        state = worker.gather_state_dict()
        if worker.rank == 0:
            found = {"losses": losses, "evaluated": evaluated, "seconds": seconds}
            order = worker.arrivals
            found["arrivals"] = None if order is None else order.tolist()
            (Path(out) / "found.json").write_text(json.dumps(found))
            torch.save(state, Path(out) / "state.pt")


if __name__ == "__main__":
    main()
