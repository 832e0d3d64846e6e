"""Local steps of each data rank, and an average of the weights after each round: local SGD, DiLoCo.

    data 0   w ─ step ─ step ─ step ─► w0 ┐   d = mean of (w - w0, w - w1)      w ─ step ─ ...
    data 1   w ─ step ─ step ─ step ─► w1 ┘   m = momentum m + d                w ─ step ─ ...
                                              w = w - lr (d + momentum m)

With outer learning rate 1 and momentum 0 that is the mean of the weights (Stich 2019, arXiv
1805.09767); with Nesterov's momentum DiLoCo (Douillard et al. 2023, arXiv 2311.08105, algorithm 1).
Every data rank keeps the states of its own optimizer from round to round. Differences are added up
in the order of the data ranks, so that one process can repeat a run to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from parcompiler.instruction import Instruction, Kind
from parcompiler.runtime.axis import flattened, unflattened
from parcompiler.runtime.channels import Channels
from parcompiler.runtime.program import RankProgram


class Rounds:
    """The rounds of one rank, over its trained `weights` by name (masters where it has some).

    `position` counts the steps done in the round. `anchors` are the weights at its begin, on which
    the outer optimizer steps with its momenta; there are none where weights are just averaged.
    """

    def __init__(
        self, program: RankProgram, weights: Mapping[str, nn.Parameter], channels: Channels
    ) -> None:
        self._program, self._weights, self._channels = program, weights, channels
        at = program.coordinate
        self._ranks = program.grid.replicas((at.pipeline,), at.tensor)
        lines = [x for x in program.instructions if x.kind is Kind.AVERAGE_PARAMETERS]
        self._names = {line: program.summed[line.value or ""] for line in lines}
        self.anchors: dict[str, nn.Parameter] = {}
        self._outer: torch.optim.SGD | None = None
        if weights and not program.updates.averages:
            rate, momentum = program.updates.outer
            self.anchors = {name: nn.Parameter(w.detach().clone()) for name, w in weights.items()}
            self._outer = torch.optim.SGD(
                self.anchors.values(), rate, momentum, nesterov=momentum > 0
            )
        self.position = 0

    def kept(self, kind: str, name: str) -> torch.Tensor | None:
        """A weight's state to save: its "outer anchor", within a round, or its "outer momentum"."""
        anchor = self.anchors.get(name)
        if anchor is None or self._outer is None:
            return None
        if kind == "outer anchor":
            return anchor.detach() if self.position else None
        momentum: torch.Tensor | None = self._outer.state[anchor].get("momentum_buffer")
        return momentum

    def restore(self, key: str, tensor: torch.Tensor) -> None:
        """Restore a tensor of `kept`, by kind and name."""
        kind, _, name = key.partition("/")
        if self._outer is not None and kind == "outer anchor":
            self.anchors[name].copy_(tensor)
        elif self._outer is not None:
            self._outer.state[self.anchors[name]]["momentum_buffer"] = tensor.detach()

    @torch.no_grad()
    def begin(self) -> None:
        """Begin a step."""
        for name, anchor in self.anchors.items() if self.position == 0 else ():
            anchor.copy_(self._weights[name])

    @torch.no_grad()
    def end(self) -> Iterator[Instruction]:
        """End a step. After the last one of a round it yields each line, and then executes it: a
        collective of the data ranks."""
        self.position = (self.position + 1) % self._program.updates.every
        if self.position:
            return
        for line, bucket in self._names.items():
            yield line
            names = [name for name in bucket if name in self._weights]
            for name, mean in self._means(names):
                if self._outer is None:
                    self._weights[name].copy_(mean)
                else:
                    self.anchors[name].grad = mean
        if self._outer is not None:
            self._outer.step()
            self._outer.zero_grad()
            for name, anchor in self.anchors.items():
                self._weights[name].copy_(anchor)

    def _means(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Means over the data ranks of weights, or of their differences from the anchors."""
        tensors = [self._weights[n].detach() for n in names]
        if self._outer is not None:
            tensors = [self.anchors[n] - weight for n, weight in zip(names, tensors, strict=True)]
        bucket = flattened(tensors)
        self._channels.sum_in_order(bucket, self._ranks)
        bucket /= self._program.data
        return zip(names, unflattened(bucket, tensors), strict=True)
