"""One compute instruction of a schedule, and four functions that make one.

>>> [str(make(2, 0)) for make in (forward, backward, backward_input, backward_weight)]
['F0', 'B0', 'I0', 'W0']
>>> forward(2, 0).cell
'2F0'
"""

from __future__ import annotations

from typing import NamedTuple

from parcompiler.instruction import Kind

NOWHERE = -1  # the stage of vocabulary passes, which every rank computes
LETTERS = {
    Kind.FORWARD: "F",
    Kind.BACKWARD: "B",
    Kind.BACKWARD_INPUT: "I",
    Kind.BACKWARD_WEIGHT: "W",
    Kind.S: "S",
    Kind.NORMALIZE: "N",
    Kind.T: "T",
}


class Action(NamedTuple):
    """One compute instruction: `kind` of stage `stage` for micro-batch `microbatch`."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        """`F3`, `B3`, `I3` or `W3`: unambiguous where a rank has one stage."""
        return f"{LETTERS[self.kind]}{self.microbatch}"

    @property
    def cell(self) -> str:
        """`2F3`: the stage comes first, as in the CSV of torch.distributed.pipelining."""
        return str(self) if self.stage == NOWHERE else f"{self.stage}{self}"


Orders = tuple[tuple[Action, ...], ...]  # the actions of each rank, in order


def forward(stage: int, microbatch: int) -> Action:
    """The forward of a stage for a micro-batch."""
    return Action(Kind.FORWARD, stage, microbatch)


def backward(stage: int, microbatch: int) -> Action:
    """The backward of a stage for a micro-batch."""
    return Action(Kind.BACKWARD, stage, microbatch)


def backward_input(stage: int, microbatch: int) -> Action:
    """The part of a backward that other stages wait for: gradients of inputs."""
    return Action(Kind.BACKWARD_INPUT, stage, microbatch)


def backward_weight(stage: int, microbatch: int) -> Action:
    """The part of a backward that no other stage waits for: gradients of weights."""
    return Action(Kind.BACKWARD_WEIGHT, stage, microbatch)
