"""Data ranks: gradients of the mean over all batches, summed once a step and as early as may be."""

from collections.abc import Mapping
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from parcompiler.capture import capture
from parcompiler.capture.clean import simplify
from parcompiler.codegen.rank import rank_program
from parcompiler.graph import Graph
from parcompiler.instruction import Instruction, Kind, parse
from parcompiler.runtime.program import RankProgram
from parcompiler.runtime.reduction import Reduction
from tests import zoo
from tests.runtime.ranks import Ranks, divided, reference, same

WIDTH = 4


class Layers(nn.Module):
    """Three layers, and a parameter that only reaches what is detached."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.idle = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + (x * self.idle).detach()
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.sum()


def graph_of(model: nn.Module, inputs: Any) -> Graph:
    return simplify(capture(model, inputs))


@pytest.mark.parametrize(
    ("name", "schedule", "pipeline", "data"),
    [
        ("gpt-tied", "1f1b", 1, 2),
        ("gpt-tied", "zb-v", 2, 2),
        ("llama", "1f1b", 2, 3),
        ("resnet", "gpipe", 1, 3),
        ("t5", "1f1b", 2, 2),
    ],
)
def test_every_data_rank_has_the_gradients_of_the_mean(
    name: str, schedule: str, pipeline: int, data: int
) -> None:
    model, inputs = zoo.build(name)
    model.double()
    inputs = {k: t.double() if t.is_floating_point() else t for k, t in inputs.items()}
    ranks = Ranks(divided(graph_of(model, inputs), schedule, pipeline, 2, data=data))
    step = ranks.step()
    loss, gradients = reference(model, ranks)
    for found in step.losses:
        assert torch.allclose(found, loss, rtol=1e-12)
    for own in step.gradients:
        for key, gradient in own.items():
            error = (gradient - gradients[key]).abs().max()
            assert error <= 1e-9 * gradients[key].abs().max() + 1e-15, key
    assert {key for own in step.gradients for key in own} == gradients.keys()


def test_however_late_messages_are_the_bits_are_the_same() -> None:
    model, inputs = zoo.build("gpt-tied")
    ranks = Ranks(divided(graph_of(model, inputs), "1f1b", 2, 3, data=2))
    first = ranks.step(seed=0)
    for seed in range(1, 9):
        assert ranks.step(seed) == first
    replicas = zip(first.gradients[0::2], first.gradients[1::2], strict=True)
    assert all(same(one, other) for one, other in replicas)


def test_data_ranks_draw_differently_and_again_the_same() -> None:
    torch.manual_seed(7)
    model, inputs = zoo.build("gpt-dropout")
    graph = graph_of(model, inputs)
    torch.manual_seed(0)
    ranks = Ranks(divided(graph, "1f1b", 1, 1, data=2))
    ranks.batches[1] = ranks.batches[0]
    drawn = ranks.step()
    torch.manual_seed(0)
    again = Ranks(divided(graph, "1f1b", 1, 1, data=2))
    again.batches[1] = again.batches[0]
    assert again.step() == drawn
    torch.manual_seed(0)
    alone = Ranks(divided(graph, "1f1b", 1, 1))
    assert not torch.equal(alone.step().losses[0], drawn.losses[0])
    torch.manual_seed(0)
    serial = Ranks(divided(graph, "1f1b", 1, 2))  # the same draws, one after the other
    whole = cast(Mapping[str, Tensor], ranks.batch)
    serial.batches[0] = {key: torch.cat([tensor, tensor]) for key, tensor in whole.items()}
    assert torch.allclose(serial.step().losses[0], drawn.losses[0], rtol=1e-6)


class Sums:
    """Channels that note what is summed and when, of one rank alone."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def sum(self, tensor: Tensor, ranks: tuple[int, ...]) -> "Sums":
        self.events.append(f"{tensor.numel()} over {ranks}")
        return self

    def sum_rows(self, table: Tensor, most: int, ranks: tuple[int, ...]) -> "Sums":
        self.events.append(f"{most} rows over {ranks}")
        return self

    def wait(self) -> None:
        self.events.append("wait")


def bucketed(lines: str, buckets: Mapping[str, tuple[str, ...]]) -> RankProgram:
    """A program of one rank of two with these buckets."""
    lowered = divided(graph_of(Layers(), (torch.zeros(2, WIDTH),)), "1f1b", 1, 1, data=2)
    program = rank_program(lowered, 0, "cpu")
    fields = {name: getattr(program, name) for name in program.__dataclass_fields__}
    return RankProgram(**{**fields, "instructions": parse(lines), "buckets": buckets})


LINES = """
FORWARD stage 0 mb 0
BACKWARD stage 0 mb 0
REDUCE_GRADIENTS a ranks 0,1
REDUCE_GRADIENTS b ranks 0,1
SHARE_LOSS from 0
"""
BACKWARD = Instruction(Kind.BACKWARD, stage=0, microbatch=0)


def layers() -> tuple[Layers, dict[str, Tensor]]:
    model = Layers()
    return model, dict(model.named_parameters())


def line(text: str) -> Instruction:
    return Instruction.parse(text)


def test_a_sum_starts_within_the_last_backward_as_soon_as_its_gradients_are_final() -> None:
    model, tensors = layers()
    late, early = ("layers.2.bias", "layers.2.weight"), ("layers.1.weight", "layers.0.weight")
    program = bucketed(LINES, {"a": late, "b": early})
    reduction, sums = Reduction(program, tensors), Sums()
    reduction.begin(sums)
    model(torch.ones(2, WIDTH)).backward()  # of another micro-batch: nothing is final
    assert sums.events == []
    tensors["layers.0.weight"].register_hook(lambda _: sums.events.append("still going back"))
    with reduction.watching(BACKWARD):
        model(torch.ones(2, WIDTH)).backward()
    expected = ["20 over (0, 1)", "still going back", "32 over (0, 1)"]
    assert sums.events == expected
    for text in ("REDUCE_GRADIENTS a ranks 0,1", "REDUCE_GRADIENTS b ranks 0,1"):
        reduction.start(line(text))
    assert sums.events == expected
    assert [str(found) for found in reduction.wait()] == LINES.split("\n")[3:5]
    assert sums.events == [*expected, "wait", "wait"]


def test_sums_start_in_the_order_of_the_list_whatever_is_final_first() -> None:
    model, tensors = layers()
    program = bucketed(LINES, {"a": ("layers.0.weight",), "b": ("layers.2.bias",)})
    reduction, sums = Reduction(program, tensors), Sums()
    reduction.begin(sums)
    with reduction.watching(BACKWARD):
        model(torch.ones(2, WIDTH)).backward()
    assert sums.events == ["16 over (0, 1)", "4 over (0, 1)"]


def test_a_parameter_without_a_gradient_delays_its_bucket_and_gets_none() -> None:
    model, tensors = layers()
    program = bucketed(LINES, {"a": ("layers.2.weight", "idle"), "b": ("layers.0.weight",)})
    reduction, sums = Reduction(program, tensors), Sums()
    reduction.begin(sums)
    with reduction.watching(BACKWARD):
        model(torch.ones(2, WIDTH)).backward()
    assert sums.events == []
    reduction.start(line("REDUCE_GRADIENTS a ranks 0,1"))
    assert sums.events == ["20 over (0, 1)"]
    reduction.start(line("REDUCE_GRADIENTS b ranks 0,1"))
    assert sums.events == ["20 over (0, 1)", "16 over (0, 1)"]
    assert model.idle.grad is None


def test_gradients_are_views_of_one_tensor_and_a_single_one_is_not_copied() -> None:
    model, tensors = layers()
    pair = ("layers.2.bias", "layers.1.bias")
    program = bucketed(LINES, {"a": pair, "b": ("layers.0.weight",)})
    reduction = Reduction(program, tensors)
    model(torch.ones(2, WIDTH)).backward()
    single = tensors["layers.0.weight"].grad
    values = [tensors[name].grad.clone() for name in pair]  # type: ignore[union-attr]
    reduction.begin(Sums())
    for text in ("REDUCE_GRADIENTS a ranks 0,1", "REDUCE_GRADIENTS b ranks 0,1"):
        reduction.start(line(text))
    found = [tensors[name].grad for name in pair]
    assert all(torch.equal(one, two) for one, two in zip(values, found, strict=True))  # type: ignore[arg-type]
    first, second = (g.untyped_storage().data_ptr() for g in found if g is not None)
    assert first == second
    assert tensors["layers.0.weight"].grad is single


def test_only_whole_backwards_make_gradients_final_by_themselves() -> None:
    model, tensors = layers()
    lines = LINES.replace("BACKWARD stage", "BACKWARD_INPUT stage")
    lines = lines.replace("REDUCE", "BACKWARD_WEIGHT stage 0 mb 0\nREDUCE", 1)
    program = bucketed(lines, {"a": ("layers.2.bias",), "b": ("layers.0.weight",)})
    reduction, sums = Reduction(program, tensors), Sums()
    reduction.begin(sums)
    with reduction.watching(Instruction(Kind.BACKWARD_INPUT, stage=0, microbatch=0)):
        model(torch.ones(2, WIDTH)).backward()
    assert sums.events == []
