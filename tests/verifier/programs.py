"""Legal programs: tiny models, captured once, lowered under plans written by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parcompiler.capture import capture
from parcompiler.capture.blocks import Cut, cut
from parcompiler.graph import Graph
from parcompiler.lower import Lowered, communicate, lower
from parcompiler.plan import Plan, Shape, StageChoice
from parcompiler.schedules import build, stages_per_rank
from parcompiler.schedules.schedule import backward, forward

WIDTH = 4
SCHEDULES = ("naive", "gpipe", "1f1b")  # those of one stage on a rank and whole backwards


class Chain(nn.Module):
    """Four layers in a row."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.sum()


class Skips(Chain):
    """Later layers read the first result, a mask of the batch, and positions without gradients."""

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:  # type: ignore[override]
        mask = (keep > 0).float()
        first = self.layers[0](x)
        order = first.argsort(dim=-1).float()
        x = torch.tanh(first)
        for layer in list(self.layers)[1:]:
            x = torch.tanh(layer(x + first * mask + order))
        return x.sum()


class Ties(Chain):
    """On four ranks two tensors are on ranks 0 and 3, one on 1 and 3, and one on 1, 2 and 3."""

    def __init__(self) -> None:
        super().__init__(6)
        self.layers[5].weight, self.layers[5].bias = self.layers[0].weight, self.layers[0].bias
        self.layers[4].weight = self.layers[1].weight
        self.layers[4].bias = self.layers[3].bias = self.layers[2].bias


class Knots(Skips):
    """Eight layers with skips; three pairs of tensors and one of three are tied."""

    def __init__(self) -> None:
        super().__init__(8)
        self.layers[7].weight, self.layers[7].bias = self.layers[0].weight, self.layers[0].bias
        self.layers[6].weight = self.layers[2].weight
        self.layers[6].bias = self.layers[5].bias = self.layers[1].bias


class Norms(nn.Module):
    """Running statistics are updated in every forward."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(layers)
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(x, y)


def skipping(lowered: Lowered) -> tuple[str, str]:
    """The names that the two results of the first layer of `Skips` have besides the last one."""
    names = {node.name: name for node, name in lowered.variables.items()}
    return names["linear"], names["to_1"]


def _gpt2() -> Graph:
    """A tied GPT-2 of Hugging Face."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: dict[str, Any] = {
        "n_layer": 3,
        "n_head": 2,
        "n_embd": 8,
        "vocab_size": 32,
        "n_positions": 8,
    }
    chance: dict[str, Any] = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = GPT2Config(**sizes, **chance, use_cache=False, bos_token_id=0, eos_token_id=0)
    return capture(GPT2LMHeadModel(config), {"input_ids": _tokens(), "labels": _tokens()})


def _t5() -> Graph:
    """A T5 of Hugging Face: every layer of the decoder reads the encoder's result."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes: dict[str, Any] = {"d_model": 8, "d_kv": 4, "d_ff": 16, "num_heads": 2, "vocab_size": 32}
    layers: dict[str, Any] = {"num_layers": 2, "num_decoder_layers": 2, "decoder_start_token_id": 0}
    config = T5Config(**sizes, **layers, use_cache=False, dropout_rate=0.0)
    model = T5ForConditionalGeneration(config)
    return capture(model, {"input_ids": _tokens(), "labels": _tokens()})


def _tokens() -> Tensor:
    return torch.ones(2, 8, dtype=torch.long)


def _rows() -> Tensor:
    return torch.zeros(2, WIDTH)


GRAPHS: Mapping[str, Callable[[], Graph]] = {
    "chain": lambda: capture(Chain(), (_rows(),)),
    "skips": lambda: capture(Skips(), (_rows(), torch.ones(2, WIDTH))),
    "ties": lambda: capture(Ties(), (_rows(),)),
    "norms": lambda: capture(Norms(), (_rows(), _rows())),
    "deep chain": lambda: capture(Chain(8), (_rows(),)),
    "deep skips": lambda: capture(Skips(8), (_rows(), torch.ones(2, WIDTH))),
    "deep norms": lambda: capture(Norms(8), (_rows(), _rows())),
    "knots": lambda: capture(Knots(), (_rows(), torch.ones(2, WIDTH))),
    "gpt2": _gpt2,
    "t5": _t5,
}
OWN = ("chain", "skips", "ties", "norms")
DEEP = ("deep chain", "deep skips", "deep norms", "knots")  # eight blocks or more
TIED = ("ties", "knots", "gpt2", "t5")  # no asynchronous schedule can have these


@cache
def graph_of(name: str) -> Graph:
    """A model's graph."""
    return GRAPHS[name]()


@cache
def captured(name: str, level: int = 1) -> tuple[Graph, Cut]:
    """A model's graph and its blocks."""
    return graph_of(name), cut(graph_of(name), level)


def plan(
    name: str,
    stages: Sequence[Sequence[str]],
    schedule: str,
    microbatches: int,
    virtual_stages: int = 1,
    data: int = 1,
    zero: int | None = None,
) -> Plan:
    """The plan that puts these blocks on stages, and those where the schedule has them."""
    ranks = len(stages) // virtual_stages
    placement = build(schedule, ranks, microbatches, virtual_stages).placement
    choices = tuple(
        StageChoice(tuple(blocks), rank) for blocks, rank in zip(stages, placement, strict=True)
    )
    return Plan(
        name,
        "",
        Shape(pipeline=ranks, data=data),
        microbatches,
        schedule=schedule,
        virtual_stages=virtual_stages,
        granularity=1,
        stages=choices,
        zero=zero,
    )


def blocks(name: str, level: int = 1) -> list[str]:
    """The names of a model's blocks."""
    return [block.name for block in captured(name, level)[1].blocks]


def even(ranks: int, count: int) -> list[int]:
    """Numbers of blocks per stage that differ by at most one."""
    return [count * (rank + 1) // ranks - count * rank // ranks for rank in range(ranks)]


def program(
    name: str,
    ranks: int,
    schedule: str,
    microbatches: int,
    counts: Sequence[int] = (),
    virtual_stages: int = 1,
    data: int = 1,
    zero: int | None = None,
) -> Lowered:
    """The program of a model with its blocks in order, `counts` of them on each stage."""
    each = stages_per_rank(schedule, virtual_stages)
    level = 1 if len(blocks(name)) >= ranks * each else 2
    names = blocks(name, level)
    ends = [0, *accumulate(counts or even(ranks * each, len(names)))]
    stages = [names[a:b] for a, b in pairwise(ends)]
    graph, parts = captured(name, level)
    choice = plan(name, stages, schedule, microbatches, each, data, zero)
    return planless(lower(graph, choice, parts))


def placed(
    name: str, stages: Sequence[Sequence[str]], schedule: str = "1f1b", microbatches: int = 3
) -> Lowered:
    """The program of a model with these blocks on each stage."""
    graph, parts = captured(name)
    return planless(lower(graph, plan(name, stages, schedule, microbatches), parts))


def planless(lowered: Lowered) -> Lowered:
    """The program without its plan: each rule is to find a mistake by itself."""
    return replace(lowered, plan=None)


def several(name: str, ranks: Sequence[int], microbatches: int) -> Lowered:
    """A program with stage `j` on `ranks[j]`, several on a rank: all forwards, then all backwards.

    rank 0  F00 F01 F20 F21 .. .. B20 B21 B00 B01     stages 0 and 2, with two micro-batches
    """
    names = blocks(name)
    ends = [0, *accumulate(even(len(ranks), len(names)))]
    stages = [names[a:b] for a, b in pairwise(ends)]
    single = placed(name, stages, "gpipe", microbatches)
    moved = tuple(replace(s, rank=r) for s, r in zip(single.stages, ranks, strict=True))
    holders = {n: {s.rank for s in moved if n in s.tensors} for n in single.graph.by_name}
    tied = [replace(item, ranks=tuple(sorted(holders[item.name]))) for item in single.tied]
    kept = tuple(item for item in tied if len(item.ranks) > 1)
    size, values = max(ranks) + 1, single.values
    orders = [
        [
            *(forward(s.index, i) for s in moved if s.rank == r for i in range(microbatches)),
            *(
                backward(s.index, i)
                for s in moved[::-1]
                if s.rank == r
                for i in range(microbatches)
            ),
        ]
        for r in range(size)
    ]
    return replace(
        single,
        stages=moved,
        tied=kept,
        instructions=communicate.training(orders, moved, values, kept),
        evaluation=communicate.evaluation(size, microbatches, moved, values),
    )
