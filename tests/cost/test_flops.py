"""FLOPs of products equal formulas worked out by hand."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from parcompiler.cost.operation import describe
from tests.cost.blocks import GptLayer
from tests.cost.capture import capture, cost_of, products


def test_a_linear_does_one_product_forward_and_two_backward() -> None:
    cost = cost_of(nn.Linear(16, 24), torch.randn(8, 16, requires_grad=True))
    assert products(cost.forward) == 2 * 8 * 16 * 24
    assert products(cost.backward) == 2 * (2 * 8 * 16 * 24)


def test_a_product_of_complex_numbers_counts_four_of_real_ones() -> None:
    a, b = torch.randn(3, 4, dtype=torch.complex64), torch.randn(4, 5, dtype=torch.complex64)
    operation = describe(torch.ops.aten.mm.default, (a, b), {}, a @ b)
    assert operation is not None
    assert (operation.flops, operation.dtype) == (4 * 2 * 3 * 4 * 5, torch.float32)
    assert operation.nbytes == 8 * (3 * 4 + 4 * 5 + 3 * 5)


def test_a_linear_whose_input_needs_no_gradient_does_only_the_weight_product() -> None:
    cost = cost_of(nn.Linear(16, 24), torch.randn(8, 16))
    assert products(cost.backward) == 2 * 8 * 16 * 24


def test_a_linear_with_frozen_weights_does_only_the_input_product() -> None:
    linear = nn.Linear(16, 24).requires_grad_(False)
    cost = cost_of(linear, torch.randn(8, 16, requires_grad=True))
    assert products(cost.backward) == 2 * 8 * 16 * 24
    assert (cost.saved, cost.saved_inputs) == (0, 0)


def test_a_perceptron_saves_the_first_input_product_when_its_input_needs_no_gradient() -> None:
    up, down = 2 * 8 * 16 * 64, 2 * 8 * 64 * 4
    perceptron = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))
    with_input = cost_of(perceptron, torch.randn(8, 16, requires_grad=True))
    without = cost_of(perceptron, torch.randn(8, 16))
    assert products(with_input.forward) == products(without.forward) == up + down
    assert products(with_input.backward) == 2 * (up + down)
    assert products(without.backward) == up + 2 * down


def test_an_attention_layer_counts_its_scores_and_the_backward_computes_them_again() -> None:
    batch, length, width, heads = 2, 16, 32, 4
    cost = cost_of(GptLayer(width, heads), torch.randn(batch, length, width, requires_grad=True))
    linears = 2 * batch * length * 12 * width**2
    scores = 2 * batch * heads * length**2 * (width // heads)
    assert products(cost.forward, "matmul") == linears
    assert products(cost.forward, "attention") == 2 * scores
    assert products(cost.backward, "matmul") == 2 * linears
    assert products(cost.backward, "attention") == 5 * scores


def test_attention_without_a_fused_kernel_counts_two_products_and_twice_that() -> None:
    class Attention(nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)

    heads = [torch.randn(2, 4, 16, 8, requires_grad=True) for _ in range(3)]
    cost = cost_of(Attention(), *heads)
    scores = 2 * 2 * 4 * 16**2 * 8
    assert (products(cost.forward), products(cost.backward)) == (2 * scores, 4 * scores)


@pytest.mark.parametrize("arguments", [(), (None, 0.1), (None, 0.1, True)])
def test_dropout_of_an_accelerator_is_part_of_the_kernel_of_attention(
    arguments: tuple[object, ...],
) -> None:
    class Attention(nn.Module):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__()
            self.arguments, self.options = arguments, options

        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(q, k, v, *self.arguments, **self.options)

    heads = [torch.randn(2, 4, 16, 8, requires_grad=True) for _ in range(3)]
    dropping = Attention(*arguments) if arguments else Attention(dropout_p=0.1)
    cost = capture(dropping, *heads).cost(accelerator=True)
    assert cost == cost_of(Attention(is_causal=len(arguments) > 2), *heads)


def test_time_is_that_of_the_scores_that_a_causal_mask_leaves() -> None:
    class Attention(nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    for rows, seen in ((64, 65 / 128), (16, 17 / 128), (128, (65 / 2 + 64) / 128)):
        query = torch.randn(2, 4, rows, 8, requires_grad=True)
        pair = [torch.randn(2, 4, 64, 8, requires_grad=True) for _ in range(2)]
        cost = capture(Attention(), query, *pair).cost()
        for kernel in (*cost.forward, *cost.backward):
            if kernel.kind == "attention":
                assert kernel.computed == pytest.approx(seen * kernel.flops)


def test_an_accelerator_keeps_no_scores_where_values_have_another_width() -> None:
    class Attention(nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.5)

    heads = [torch.randn(2, 4, 64, width, requires_grad=True) for width in (24, 24, 16)]
    cost = capture(Attention(), *heads).cost(accelerator=True)
    pair = 2 * 2 * 4 * 64**2
    assert products(cost.forward) == products(cost.forward, "attention") == pair * (24 + 16)
    assert products(cost.backward, "attention") == pair * (3 * 24 + 2 * 16)
    assert cost.saved < 2 * 4 * 64**2 * 4


def test_dropout_of_an_accelerator_keeps_a_mask_of_bytes() -> None:
    x = torch.randn(64, 256, requires_grad=True)
    captured = capture(nn.Dropout(0.1), x)
    on_cpu, elsewhere = captured.cost(), captured.cost(accelerator=True)
    assert (on_cpu.saved, elsewhere.saved) == (x.nbytes, x.numel())
    assert len(elsewhere.forward) == len(elsewhere.backward) == 1 < len(on_cpu.forward)


def test_a_convolution_counts_each_tap_of_each_output() -> None:
    conv = nn.Conv2d(8, 12, 3, stride=2, padding=1)
    forward = 2 * (2 * 8 * 8 * 12) * (8 * 3 * 3)
    cost = cost_of(conv, torch.randn(2, 8, 16, 16, requires_grad=True))
    assert products(cost.forward, "convolution") == products(cost.forward) == forward
    assert products(cost.backward, "convolution") == 2 * forward
    assert products(cost_of(conv, torch.randn(2, 8, 16, 16)).backward) == forward


def test_a_grouped_convolution_counts_the_channels_of_its_group() -> None:
    conv = nn.Conv2d(8, 8, 3, padding=1, groups=4)
    forward = 2 * (2 * 8 * 8 * 8) * (2 * 3 * 3)
    cost = cost_of(conv, torch.randn(2, 8, 8, 8, requires_grad=True))
    assert (products(cost.forward), products(cost.backward)) == (forward, 2 * forward)


def test_a_transposed_convolution_counts_each_tap_of_each_input() -> None:
    conv = nn.ConvTranspose2d(8, 4, 2, stride=2)
    forward = 2 * (2 * 8 * 8 * 8) * (4 * 2 * 2)
    cost = cost_of(conv, torch.randn(2, 8, 8, 8, requires_grad=True))
    assert (products(cost.forward), products(cost.backward)) == (forward, 2 * forward)


def test_a_grouped_product_counts_each_row_with_one_matrix() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 16, 32, dtype=torch.bfloat16))

        def forward(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
            return F.grouped_mm(rows, self.weight, offs=ends)

    rows = torch.randn(64, 16, dtype=torch.bfloat16, requires_grad=True)
    cost = cost_of(Experts(), rows, torch.tensor([8, 16, 40, 64], dtype=torch.int32))
    forward = 2 * 64 * 16 * 32
    assert (products(cost.forward), products(cost.backward)) == (forward, 2 * forward)
    assert cost.estimated == ()


def test_products_of_a_matrix_and_a_vector_count() -> None:
    class Product(nn.Module):
        def forward(self, matrix: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
            product = matrix @ vector
            return product.dot(torch.addmv(product, matrix, vector))

    cost = cost_of(Product(), torch.randn(8, 4), torch.randn(4))
    assert products(cost.forward) == 2 * (2 * 8 * 4) + 2 * 8
    assert cost.backward == ()
