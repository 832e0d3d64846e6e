"""Blocks that are cut out of a graph, in unusual contexts, or that cannot run without data."""

import dataclasses
import time
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from parcompiler.cost import known_results, trace_block
from parcompiler.errors import InputError
from parcompiler.graph import NodeRoles
from tests.cost.blocks import GptLayer, ResidualBlock
from tests.cost.capture import Captured, capture, cost_of, products, really_saved


def test_two_traces_of_a_block_are_equal() -> None:
    layer = capture(GptLayer(32, 4), torch.randn(2, 8, 32, requires_grad=True))
    assert layer.cost() == layer.cost()


def python_objects() -> None:
    """Some 20 ms of Python on a core that is neither new nor old."""
    made: dict[int, tuple[int, str]] = {}
    for i in range(200_000):
        made[i % 1000] = i, str(i)


def test_a_large_layer_is_traced_without_memory_and_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with torch.device("meta"):
        layer = capture(GptLayer(8192, 64), torch.randn(8, 4096, 8192))

    def traced() -> None:
        monkeypatch.setattr(known_results, "_known", {})  # as if its sizes were new
        layer.cost()

    seconds: dict[Any, list[float]] = {traced: [], python_objects: []}
    for _ in range(5):
        for work, taken in seconds.items():
            start = time.process_time()
            work()
            taken.append(time.process_time() - start)
    assert min(seconds[traced]) < 2.3 * min(seconds[python_objects])  # whatever the machine


def test_views_cost_nothing_and_bytes_are_those_read_and_written() -> None:
    class Broadcast(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x.view(8, 4).T.unsqueeze(0) + y.expand(3, 4, 8)

    cost = cost_of(Broadcast(), torch.randn(32), torch.randn(1, 4, 8))
    (add,) = cost.forward
    assert (add.name, add.kind, add.dtype) == ("aten.add.Tensor", "other", torch.float32)
    assert (add.flops, add.nbytes) == (96, 4 * (32 + 32 + 96))


def test_an_embedding_reads_the_rows_that_it_yields() -> None:
    cost = cost_of(nn.Embedding(10_000, 16), torch.arange(8))
    (lookup,) = cost.forward
    assert lookup.nbytes == 8 * 8 + 2 * (8 * 16 * 4)
    assert cost.backward[-1].nbytes >= 10_000 * 16 * 4  # its gradient is dense


def test_a_bag_of_embeddings_reads_the_rows_of_its_indices() -> None:
    bag = nn.EmbeddingBag(10_000, 16, mode="sum")
    (lookup,) = cost_of(bag, torch.arange(12), torch.tensor([0, 4, 8])).forward
    assert 12 * 16 * 4 <= lookup.nbytes < 10_000


def test_an_update_of_some_rows_in_place_moves_those_rows() -> None:
    class Update(nn.Module):
        def forward(self, table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
            table[:2] = rows
            return table.index_add_(0, torch.arange(2, device=table.device), rows)

    cost = cost_of(Update(), torch.randn(1000, 4), torch.randn(2, 4))
    copy, _, add = cost.forward
    assert (copy.nbytes, add.nbytes) == (2 * 32, 2 * (32 + 2 * 8))


def test_an_operator_that_reshapes_in_place_is_estimated() -> None:
    class Squeezed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * 2).squeeze_(0) + 1

    cost = cost_of(Squeezed(), torch.randn(1, 4, requires_grad=True))
    assert cost.estimated == ("aten.squeeze_.dim",)
    assert [item.name for item in cost.forward] == ["aten.mul.Tensor", "aten.add.Tensor"]


def test_a_block_in_the_middle_receives_a_gradient_and_passes_one_on() -> None:
    layers = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    graph = capture(layers, torch.randn(3, 4))
    first, second, _ = graph.nodes
    middle = graph.cost(nodes=[second], inputs=[first], outputs=[second])
    head = graph.cost(nodes=[first], outputs=[first])
    assert products(middle.backward) == 2 * (2 * 3 * 8 * 8)
    assert products(head.backward) == 2 * 3 * 4 * 8
    assert (middle.saved, middle.saved_inputs) == (0, 3 * 8 * 4)
    assert (middle.kept_inputs, middle.kept_outputs) == ((0,), ())
    assert middle.output_bytes == 3 * 8 * 4


def test_a_block_without_gradients_has_no_backward() -> None:
    class Mask(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ones(4, 4, device=x.device).tril()[None] * x

    cost = cost_of(Mask(), torch.randn(2, 4, 4))
    assert cost.forward
    assert (cost.backward, cost.saved, cost.saved_inputs) == ((), 0, 0)
    assert (cost.kept_inputs, cost.kept_outputs) == ((), ())


def test_an_input_may_be_changed_in_place() -> None:
    class InPlace(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu_(x) * 2

    cost = cost_of(InPlace(), torch.randn(4, 4, requires_grad=True))
    assert [operation.name for operation in cost.forward] == [
        "aten.relu_.default",
        "aten.mul.Tensor",
    ]
    assert (cost.saved, cost.saved_inputs, cost.kept_inputs) == (0, 64, (0,))
    assert len(cost.backward) == 2


def test_running_statistics_are_state_of_the_block() -> None:
    cost = cost_of(ResidualBlock(8), torch.randn(2, 8, 4, 4, requires_grad=True))
    assert "aten.add_.Tensor" in {operation.name for operation in cost.forward}
    assert cost.estimated == ()


def test_nodes_without_gradients_are_run_without_them() -> None:
    graph = capture(nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True))
    for node in graph.nodes:
        node.meta["contexts"] = (("no_grad",),)
    cost = graph.cost()
    assert (cost.saved, cost.saved_inputs, cost.backward) == (0, 0, ())


def test_autocast_casts_as_in_a_real_run() -> None:
    class Cast(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> Any:
            with torch.autocast("cpu", torch.bfloat16):
                return self.inner(x)

    x = torch.randn(8, 4, requires_grad=True)
    perceptron = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 4))
    graph = capture(perceptron, x)
    for node in graph.nodes:
        node.meta["contexts"] = (("autocast", "cpu", "bfloat16", True),)
    cost = graph.cost()
    assert (cost.saved, cost.saved_inputs) == really_saved(Cast(perceptron), x)
    assert {item.dtype for item in cost.forward if item.kind == "matmul"} == {torch.bfloat16}


def test_symbolic_sizes_count_as_those_of_the_example() -> None:
    dynamic = ({0: torch.export.Dim.DYNAMIC},)
    x = torch.randn(6, 4, requires_grad=True)
    symbolic = capture(nn.Linear(4, 8), x, dynamic_shapes=dynamic).cost()
    assert symbolic == cost_of(nn.Linear(4, 8), x)


def test_a_size_that_depends_on_data_is_estimated_by_its_bound() -> None:
    class Selected(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            chosen = (x.sum(-1) > 0).nonzero().squeeze(-1)
            rows: torch.Tensor = self.linear(x[chosen])
            return rows.sum()

    cost = cost_of(Selected(), torch.randn(6, 8, requires_grad=True))
    assert cost.estimated == ("aten.nonzero.default",)
    assert products(cost.forward) == 2 * 6 * 8 * 4
    assert products(cost.backward) == 2 * products(cost.forward)


def test_routing_and_sorting_run_without_data() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(16, 4, bias=False)
            self.weight = nn.Parameter(torch.randn(4, 16, 16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores, experts = self.router(x).softmax(-1).topk(2)
            order = experts.flatten().argsort()
            ends = torch.histc(experts.float(), 4, 0, 3).cumsum(0, dtype=torch.int32)
            rows = F.grouped_mm(x[order // 2], self.weight, offs=ends)
            weighted = rows * scores.flatten()[order, None]
            return torch.zeros_like(x).index_add(0, order // 2, weighted)

    x = torch.randn(8, 16, dtype=torch.bfloat16, requires_grad=True)
    cost = cost_of(Experts().bfloat16(), x)
    assert cost.estimated == ()
    assert products(cost.forward) == 2 * 8 * 16 * 4 + 2 * 16 * 16 * 16
    assert products(cost.backward) == 2 * products(cost.forward)


def opaque(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """An operator that cannot run without data."""
    assert x.sum().item() is None
    return x, 1


def handmade(function: Any) -> Captured:
    """linear -> function -> linear, as a graph written by hand."""
    graph = fx.Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    linear = torch.ops.aten.linear.default
    first = graph.call_function(linear, (x, weight))
    middle = graph.call_function(function, (first,))
    picked = graph.call_function(_first_of, (middle,))
    last = graph.call_function(linear, (picked, weight))
    for node in (x, first, picked, last):
        node.meta["val"] = torch.empty(2, 4, device="meta")
    weight.meta["val"] = torch.empty(4, 4, device="meta")
    middle.meta["val"] = (torch.empty(2, 4, device="meta"), 1)
    names = frozenset(node.name for node in graph.nodes)
    body = (first, middle, picked, last)
    return Captured(body, (x,), (last,), NodeRoles({"weight"}, (), names))


def _first_of(values: tuple[torch.Tensor, int]) -> torch.Tensor:
    return values[0]


def test_an_operator_that_needs_data_is_estimated_and_passes_gradients_on() -> None:
    cost = handmade(opaque).cost()
    assert cost.estimated == ("opaque",)
    assert [item.name for item in cost.forward] == ["aten.mm.default", "opaque", "aten.mm.default"]
    assert products(cost.backward) == 4 * (2 * 2 * 4 * 4)
    assert (cost.saved, cost.saved_inputs) == (2 * 32, 32)
    (estimate,) = (item for item in cost.backward if item.name == "opaque (backward)")
    assert (estimate.flops, estimate.nbytes) == (2 * 8, 2 * (2 * 32))


class Stubborn(torch.autograd.Function):
    """Its backward needs data."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * gradients[0].max().item()


def stubborn(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    return Stubborn.apply(x), 1  # type: ignore[no-untyped-call]


def test_a_backward_that_needs_data_is_estimated_as_twice_the_forward() -> None:
    cost = handmade(stubborn).cost()
    assert cost.estimated == ("backward",)
    assert sum(item.flops for item in cost.backward) == 2 * sum(item.flops for item in cost.forward)


def test_a_block_that_reads_what_nobody_declared_is_refused() -> None:
    graph = capture(nn.Linear(4, 4), torch.randn(2, 4))
    none = NodeRoles((), (), graph.roles.differentiable)
    with pytest.raises(InputError, match="the block reads 'p_weight', which is none of its"):
        trace_block(graph.nodes, graph.inputs, graph.outputs, none)


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_gradients_that_stay_are_in_the_peaks_of_a_first_backward(layers: int) -> None:
    value, weight = 4 * 8 * 4, 8 * 8 * 4
    chain = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(layers)))
    x = torch.randn(4, 8, requires_grad=True)
    cost = capture(chain, x).cost(split=True)
    assert cost.first_peak - cost.backward_peak == (layers - 1) * (weight - value)
    assert cost.first_input_peak == cost.input_peak
    assert cost.deferred_weights == layers * weight
    assert cost.deferred == (2 * layers - 1) * value  # the first input is the block's
    assert cost.deferred_inputs == (0,)
    left = [cost.deferred - 2 * k * value for k in range(layers)]
    assert cost.first_weight_peak == max(size + (k + 1) * weight for k, size in enumerate(left))


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_gradients_that_masters_take_are_copied_to_float32_in_the_peaks(layers: int) -> None:
    value, weight, seed = 4 * 8 * 2, 8 * 8 * 2, 4
    chain = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(layers))).bfloat16()
    x = torch.randn(4, 8, dtype=torch.bfloat16, requires_grad=True)
    captured = capture(chain, x)
    plain = captured.cost(split=True)
    roles = dataclasses.replace(captured.roles, masters=captured.roles.parameters)
    cost = dataclasses.replace(captured, roles=roles).cost(split=True)
    # The first layer's is there in 16 bits, with the gradient that it is made of, and all copies.
    assert cost.copied_peak == seed + value + weight + layers * 2 * weight
    assert (cost.first_peak, plain.copied_peak) == (plain.first_peak, plain.first_peak)
    assert cost.deferred_weights == 2 * plain.deferred_weights
    assert cost.first_weight_peak == max(
        cost.deferred - 2 * k * value + weight + (k + 1) * 2 * weight for k in range(layers)
    )
    assert (cost.backward_peak, cost.weight_peak) == (plain.backward_peak, plain.weight_peak)


class Doubled(nn.Module):
    """Sines keep what they read, sums nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.sin().sin()
        y = y + y
        y = y + y
        return y + y


def test_a_block_that_keeps_nothing_holds_what_its_variables_hold() -> None:
    x = 4 * 8 * 4
    layer = capture(Doubled(), torch.randn(4, 8, requires_grad=True))
    first, second, *sums = layer.nodes
    ends = {sums[0]: [second], sums[1]: [sums[0]]}
    cost, freed = layer.cost(), layer.cost(overwritten=ends)
    assert (cost.saved, cost.saved_inputs) == (freed.saved, freed.saved_inputs) == (x, x)
    assert (cost.unsaved_peak, freed.unsaved_peak) == (5 * x, 3 * x)
    assert (cost.forward_peak, freed.forward_peak) == (5 * x, 3 * x)
    freed = layer.cost(overwritten=ends | {second: [first]})
    assert (freed.unsaved_peak, freed.forward_peak) == (2 * x, 3 * x)  # which the backward needs


def test_a_second_run_ends_with_the_last_that_the_backward_needs() -> None:
    x = 4 * 8 * 4
    cost = capture(Doubled(), torch.randn(4, 8, requires_grad=True)).cost()
    assert cost.recompute_peak == x  # before the second sine
    assert cost.backward_peak > cost.recompute_peak + cost.gradient_bytes


def test_a_second_run_is_as_full_as_it_ever_was_before_its_end() -> None:
    class Narrowing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.repeat(1, 8).sum(1).sin().sin()

    layer = capture(Narrowing(), torch.randn(4, 8, requires_grad=True))
    wide, narrow, *_ = layer.nodes
    cost = layer.cost(overwritten={narrow: [wide]})
    assert cost.recompute_peak == cost.unsaved_peak == cost.forward_peak == 4 * (64 + 1) * 4


def test_the_gradients_of_outputs_may_be_held_to_the_end_of_the_backward() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    short, long = capture(nn.ReLU(), x).cost(), capture(Doubled(), x).cost()
    assert short.output_peak == short.backward_peak  # fullest while its gradient is needed
    assert long.output_peak == long.backward_peak + x.nbytes
