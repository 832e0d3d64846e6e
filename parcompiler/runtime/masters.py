"""Float32 masters of 16-bit parameters: what the optimizer changes, and checkpoints hold.

    weights ─► master (float32) ─► parameter (16 bits) ─► forward, backward ─► gradient (16 bits)
                  ▲      │                                                          │
                  │      └────────── state_dict                                     ▼
               optimizer ◄──────────────────────────── gradient in float32, unscaled and clipped

Gradients are kept, added up over micro-batches and summed over ranks in 16 bits (2 bytes beside the
2 of the parameter, the 4 of the master and the states of the optimizer); in the optimizer's step
each is cast to float32 and its 16 bits are freed. Parameters that are float32 in a 16-bit program
(batch norms) are their own masters; frozen ones have none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn


class Masters:
    """The masters of the trained ones among `parameters` (by name) that are in `narrow`."""

    def __init__(self, narrow: torch.dtype | None, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self._masters = {
            name: nn.Parameter(parameter.detach().float())
            for name, parameter in parameters.items()
            if parameter.requires_grad and parameter.dtype == narrow
        }

    def of(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The master of a tensor of this rank, or itself where it has none."""
        return self._masters.get(name, tensor)

    def held(self, name: str, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        """A tensor of this rank, and its master where it has one."""
        yield tensor
        if name in self._masters:
            yield self._masters[name]

    def trained(self) -> Iterator[nn.Parameter]:
        """What the optimizer changes."""
        for name, parameter in self._parameters.items():
            if parameter.requires_grad:
                yield self._masters.get(name, parameter)

    @torch.no_grad()
    def take_gradients(self, factor: torch.Tensor) -> None:
        """Give masters the gradients of their parameters times `factor`, and free those."""
        for name, parameter in self._parameters.items():
            gradient, master = parameter.grad, self._masters.get(name)
            if gradient is None:
                continue
            if master is None:
                gradient.mul_(factor)
            else:
                master.grad = gradient.float().mul_(factor)
                parameter.grad = None

    @torch.no_grad()
    def write(self) -> None:
        """Give parameters what their masters have become."""
        for name, master in self._masters.items():
            self._parameters[name].copy_(master)
            master.grad = None
