"""A small language model whose vocabulary is spread, against one process.

The programs are written by hand: every stage is one layer, all micro-batches go forward before one
comes back, and the collectives of the vocabulary stand between. Rank 0 prints what is wrong.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from parcompiler import runtime
from parcompiler.errors import InputError
from parcompiler.grid import Grid
from parcompiler.instruction import parse
from parcompiler.pieces import own_rows
from parcompiler.runtime.program import Input, RankProgram, Value

METHODS = ("naive", "interlaced", "vocab-1", "vocab-2")
V, H, ROWS, LENGTH, COUNT = 13, 4, 2, 3, 3  # COUNT micro-batches
BOUND = 1e-12
CAP = 2.0


class Model(nn.Module):
    """Embedding, layers, and a head with bias, soft cap and label smoothing, tied or not."""

    def __init__(self, layers: int, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, H, padding_idx=5)
        self.layers = nn.ModuleList(nn.Linear(H, H) for _ in range(layers))
        self.head = nn.Linear(H, V)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x).tanh()
        logits = CAP * (self.head(x[:, :-1]).flatten(0, 1) / CAP).tanh()
        return F.cross_entropy(logits, tokens[:, 1:].flatten(), ignore_index=0, label_smoothing=0.1)


def vocabulary(name: str, tied: bool) -> type[runtime.Vocabulary]:
    """What would be emitted for the model."""

    class Spread(runtime.Vocabulary):
        method = name
        size = {"embedding": V, "head": V, "bias": V}  # noqa: RUF012 (an emitted class)
        lookups = {"e": runtime.Lookup("embedding", ("tokens",), padding_idx=5)}  # noqa: RUF012
        head = runtime.Head(
            "x", "embedding" if tied else "output", ("tokens",), targets="targets", bias="bias",
            logits=True, ignore_index=0, label_smoothing=0.1,
        )  # fmt: skip
        names = {"embedding": "embedding.weight", "bias": "head.bias"}  # noqa: RUF012

        def __init__(self, ranks: int, index: int) -> None:
            super().__init__(ranks, index)
            double = torch.float64
            self.embedding = nn.Parameter(runtime.rows(V, H, ranks=ranks, dtype=double))
            self.bias = nn.Parameter(runtime.rows(V, ranks=ranks, dtype=double))
            if not tied:
                self.output = nn.Parameter(runtime.rows(V, H, ranks=ranks, dtype=double))

        def targets(self, tokens: torch.Tensor) -> torch.Tensor:
            return tokens[:, 1:].flatten()

        def logits(self, logits: torch.Tensor) -> torch.Tensor:
            return CAP * (logits / CAP).tanh()

    if not tied:
        Spread.names = {**Spread.names, "output": "head.weight"}
        Spread.size = {**Spread.size, "output": V}
    return Spread


def stage(j: int, last: int) -> type[runtime.Stage]:
    """One layer."""

    class Layer(runtime.Stage):
        receives = ("e" if j == 0 else f"h{j}",)
        gives = ("x" if j == last else f"h{j + 1}",)
        names = {"weight": f"layers.{j}.weight", "bias": f"layers.{j}.bias"}  # noqa: RUF012

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(H, H, dtype=torch.float64))
            self.bias = nn.Parameter(torch.empty(H, dtype=torch.float64))

        def forward(self, **values: torch.Tensor) -> torch.Tensor:
            (x,) = values.values()
            x = F.linear(x, self.weight, self.bias).tanh()
            return x[:, :-1].flatten(0, 1) if j == last else x

    return Layer


def lines(grid: Grid, rank: int, method: str, *, training: bool) -> Iterator[str]:
    """The program of a rank."""
    at, last = grid.coordinate(rank), grid.pipeline - 1
    j = at.pipeline
    first_rank, last_rank = (grid.rank(p, at.data) for p in (0, last))
    before, behind = (grid.rank(j + step, at.data, at.tensor) for step in (-1, 1))
    for i in range(COUNT):
        yield f"EMBED e mb {i}"
        yield f"REDUCE e mb {i} to {first_rank}"
    for i in range(COUNT):
        if j > 0:
            yield f"RECV h{j} mb {i} from {before}"
        yield f"FORWARD stage {j} mb {i}"
        if j < last:
            yield f"SEND h{j + 1} mb {i} to {behind}"
    for i in range(COUNT):
        yield f"BROADCAST x mb {i} from {last_rank}"
    for i in range(COUNT):
        yield from head(method, i, last_rank, training=training)
        if training and i > 0:  # the T of a micro-batch behind the S of the next
            yield from tail(method, i - 1, last_rank)
    if training:
        yield from tail(method, COUNT - 1, last_rank)
        yield from backward(grid, rank)
    yield f"SHARE_LOSS from {last_rank}"


def head(method: str, i: int, last_rank: int, *, training: bool) -> Iterator[str]:
    yield f"S mb {i}"
    if method in ("naive", "interlaced"):
        yield from (f"EXCHANGE maximum mb {i}", f"NORMALIZE mb {i}", f"EXCHANGE sum mb {i}")
    else:
        yield f"EXCHANGE statistics mb {i}"
    if method == "vocab-2" and training and i != 1:  # one T comes before its REDUCE
        yield f"REDUCE x.grad mb {i} to {last_rank}"


def tail(method: str, i: int, last_rank: int) -> Iterator[str]:
    yield f"T mb {i}"
    if method != "vocab-2" or i == 1:
        yield f"REDUCE x.grad mb {i} to {last_rank}"


def backward(grid: Grid, rank: int) -> Iterator[str]:
    at, last = grid.coordinate(rank), grid.pipeline - 1
    j = at.pipeline
    before, behind = (grid.rank(j + step, at.data, at.tensor) for step in (-1, 1))
    for i in range(COUNT):
        if j < last:
            yield f"RECV h{j + 1}.grad mb {i} from {behind}"
        yield f"BACKWARD stage {j} mb {i}"
        if j > 0:
            yield f"SEND h{j}.grad mb {i} to {before}"
    for i in range(COUNT):
        yield f"BROADCAST e.grad mb {i} from {grid.rank(0, at.data)}"
        yield f"EMBED_BACKWARD e mb {i}"
    if grid.data > 1:
        ranks = ",".join(map(str, grid.replicas((j,), at.tensor)))
        yield f"REDUCE_GRADIENTS all ranks {ranks}"


def program(grid: Grid, rank: int, method: str, tied: bool) -> RankProgram:
    at, last = grid.coordinate(rank), grid.pipeline - 1
    shape = (ROWS, LENGTH, H)
    values = {"e": Value(shape, torch.float64)}
    values |= {f"h{j}": Value(shape, torch.float64) for j in range(1, grid.pipeline)}
    values["x"] = Value((ROWS * (LENGTH - 1), H), torch.float64)
    names = ["embedding.weight", "head.bias"] + ([] if tied else ["head.weight"])
    own = [f"layers.{at.pipeline}.{leaf}" for leaf in ("weight", "bias")]
    channels = [(j, j + step) for j in range(last + 1) for step in (-1, 1) if 0 <= j + step <= last]
    return RankProgram(
        instructions=parse("\n".join(lines(grid, rank, method, training=True))),
        evaluation=parse("\n".join(lines(grid, rank, method, training=False))),
        rank=rank,
        size=grid.size,
        device="cpu",
        microbatches=COUNT,
        digest="1",
        loss=torch.float64,
        stages=(at.pipeline,),
        inputs={"tokens": Input("tokens", (ROWS, LENGTH), torch.int64, V)},
        values=values,
        buckets={"all": (*own, *names)} if grid.data > 1 else {},
        channels=tuple(channels),
        aliases={"head.weight": "embedding.weight"} if tied else {},
        data=grid.data,
        tensor=grid.tensor,
        rows=dict.fromkeys(names, V),
    )


def batch(number: int) -> torch.Tensor:
    """The whole batch of a data coordinate; some labels are ignored."""
    generator = torch.Generator().manual_seed(number)
    return torch.randint(V, (ROWS * COUNT, LENGTH), generator=generator)


def one_process(model: Model, data: int) -> torch.Tensor:
    """The mean loss of one process, with its gradients."""
    pieces = [piece for number in range(data) for piece in batch(number).split(ROWS)]
    losses = torch.stack([model(piece) for piece in pieces])
    losses.mean().backward()
    return losses.mean().detach()


def evaluation(state: dict[str, torch.Tensor], grid: Grid, tied: bool, n: int) -> torch.Tensor:
    """The mean loss of the first `n` micro-batches of every data coordinate, in one process."""
    model = Model(grid.pipeline, tied).double()
    model.load_state_dict(state)
    pieces = [piece for number in range(grid.data) for piece in batch(number).split(ROWS)[:n]]
    return torch.stack([model(piece) for piece in pieces]).mean().detach()


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30))


def check(grid: Grid, method: str, tied: bool) -> Iterator[str]:
    """Everything that a worker does; what is wrong."""
    torch.manual_seed(0)
    model = Model(grid.pipeline, tied).double()
    rank, state = dist.get_rank(), {n: t.clone() for n, t in model.state_dict().items()}
    at, own = grid.coordinate(rank), program(grid, rank, method, tied)
    data = {"tokens": batch(at.data)}
    last = grid.pipeline - 1
    made: Callable[[int, int], runtime.Vocabulary] = vocabulary(method, tied)
    tensors = of_own_rows(state, own) if tied else state
    with runtime.Worker(
        own, {at.pipeline: stage(at.pipeline, last)}, tensors.items(), vocabulary=made
    ) as worker:
        wanted = one_process(model, grid.data)
        worker.set_optimizer(torch.optim.SGD, lr=0.1)
        evaluated = worker.evaluate(data)
        fewer = [worker.evaluate({"tokens": data["tokens"][: ROWS * n]}) for n in (1, COUNT - 1)]
        worker.record()
        loss = worker.step(data)
        gradients = worker.gather_gradients()
        if error(loss, wanted) > BOUND:
            yield f"loss {loss.item()} and not {wanted.item()}"
        if error(evaluated, wanted) > BOUND:
            yield f"evaluated loss {evaluated.item()} and not {wanted.item()}"
        for n, lost in zip((1, COUNT - 1), fewer, strict=True):
            if error(lost, evaluation(state, grid, tied, n)) > BOUND:
                yield f"evaluated loss {lost.item()} of {n} micro-batches"
        if len(worker.trace()) != len(own.instructions):
            yield "instructions without a record"
        if rank == 0:
            assert gradients is not None
            yield from compared(gradients, {n: p.grad for n, p in model.named_parameters()})
        elif gradients is not None:
            yield "gradients elsewhere than on rank 0"
        if not torch.equal(worker.train_step(data), loss):
            yield "another loss in a second step"
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        found = worker.gather_state_dict()
        if found is not None:
            yield from compared(found, model.state_dict())
        for name, tensor in worker.named_parameters():
            if name in own.rows and tensor[own_size(own) :].any():
                yield f"padding of {name} is used"
    if tied and method == "vocab-2":
        yield from refused(own, {at.pipeline: stage(at.pipeline, last)}, state, made, data)


def compared(found: dict[str, Any], wanted: dict[str, Any]) -> Iterator[str]:
    if missing := wanted.keys() ^ found.keys():
        yield f"other names: {sorted(missing)}"
    for name in wanted.keys() & found.keys():
        if (wrong := error(found[name], wanted[name])) > BOUND:
            yield f"{name} differs by {wrong}"


def own_size(own: RankProgram) -> int:
    ranks = own.grid.plane(own.coordinate.data)
    return own_rows(V, len(ranks), ranks.index(own.rank)).size


def of_own_rows(state: dict[str, torch.Tensor], own: RankProgram) -> dict[str, torch.Tensor]:
    """A state of which each rank has its rows alone."""
    ranks = own.grid.plane(own.coordinate.data)
    rows = own_rows(V, len(ranks), ranks.index(own.rank))
    return {
        name: tensor[rows.start : rows.start + rows.size] if name in own.rows else tensor
        for name, tensor in state.items()
    }


def refused(
    own: RankProgram,
    stages: dict[int, Any],
    state: dict[str, torch.Tensor],
    made: Callable[[int, int], runtime.Vocabulary],
    data: dict[str, torch.Tensor],
) -> Iterator[str]:
    """A word that is none, as label and as index."""
    for column in (0, 1):
        wrong = data["tokens"].clone()
        wrong[-1, column] = V
        with runtime.Worker(own, stages, state.items(), vocabulary=made) as worker:
            try:
                worker.step({"tokens": wrong})
            except InputError as found:
                if f"({V} given)" not in str(found):
                    yield f"another message: {found}"
            else:
                yield "a word that is none is taken"


def cases(ranks: int) -> dict[str, tuple[Grid, str, bool]]:
    """Every method on every mesh; interlaced has the lines that naive has."""
    grids = [Grid(2)] if ranks == 2 else [Grid(4), Grid(2, 1, 2), Grid(2, 2, 1)]
    return {
        f"{method} {grid.pipeline}x{grid.data}x{grid.tensor}{' tied' * tied}": (grid, method, tied)
        for grid in grids
        for method in METHODS
        for tied in (False, True)
        if method != "interlaced" or ranks == 2
    }


def main() -> None:
    dist.init_process_group("gloo")
    found: dict[str, list[str]] = {}
    for name, (grid, method, tied) in cases(dist.get_world_size()).items():
        try:
            found[name] = list(check(grid, method, tied))
        except Exception as wrong:  # whatever it is, it belongs to the case
            found[name] = [f"{type(wrong).__name__}: {wrong}"]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, found)
    if dist.get_rank() == 0:
        print(json.dumps({name: [one[name] for one in every] for name in found}), flush=True)
    dist.destroy_process_group()
    # A thread of gloo that is left may free a tensor while Python ends: that aborts the process.
    if left := [name for name in threads() if "gloo" in name]:
        message = f"threads of a process group outlive it: {left}"
        raise RuntimeError(message)


def threads() -> list[str]:
    """The names of this process's threads, where the system tells them."""
    return [(task / "comm").read_text().strip() for task in Path("/proc/self/task").glob("*")]
