"""The bytes that are kept for the backward equal those of a real run."""

import pytest
import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn import functional as F

from tests.cost.blocks import GptLayer, Loss, ResidualBlock
from tests.cost.capture import capture, cost_of, really_saved


def check(module: nn.Module, *args: torch.Tensor, more: int = 0) -> None:
    cost = cost_of(module, *args)
    own, inputs = really_saved(module, *args)
    assert (cost.saved, cost.saved_inputs) == (own + more, inputs)
    assert cost.estimated == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_gpt_layer_saves_what_a_real_run_saves(dtype: torch.dtype) -> None:
    hidden = torch.randn(2, 16, 32, dtype=dtype, requires_grad=True)
    check(GptLayer(32, 4).to(dtype), hidden)


def test_a_residual_block_saves_what_a_real_run_saves() -> None:
    check(ResidualBlock(8), torch.randn(2, 8, 16, 16, requires_grad=True))


def test_embedding_dropout_and_loss_save_what_a_real_run_saves() -> None:
    check(Loss(50, 16), torch.randint(50, (2, 8)), torch.randint(50, (2, 8)))


def test_norms_in_bfloat16_keep_float32_statistics_as_on_an_accelerator() -> None:
    hidden = torch.randn(2, 16, 32, dtype=torch.bfloat16, requires_grad=True)
    norms, statistics, rows, difference = 2, 2, 2 * 16, 4 - 2
    more = norms * statistics * rows * difference
    check(GptLayer(32, 4).bfloat16(), hidden, more=more)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norms_keep_what_they_read_on_accelerators(dtype: torch.dtype) -> None:
    """And a number or two for each row; on the CPU two copies in float32."""
    hidden = torch.randn(2, 16, 32, requires_grad=True).to(dtype)
    block = capture(nn.RMSNorm(32).to(dtype), hidden)
    one = block.cost(accelerator=True)
    assert (one.saved_inputs, one.saved) == (hidden.nbytes, 2 * 2 * 16 * 4)
    kernels = [operation.name for operation in (*one.forward, *one.backward)]
    assert kernels == ["aten.native_layer_norm.default", "aten.native_layer_norm_backward.default"]
    assert block.cost().saved >= 2 * 16 * 32 * 4


def test_batch_norms_in_evaluation_keep_statistics_as_on_an_accelerator() -> None:
    image = torch.randn(2, 8, 16, 16, requires_grad=True)
    norms, statistics, channels = 2, 2, 8
    check(ResidualBlock(8).eval(), image, more=norms * statistics * channels * 4)


def test_a_bert_layer_of_transformers_saves_what_a_real_run_saves() -> None:
    bert = pytest.importorskip("transformers.models.bert.modeling_bert")
    config = bert.BertConfig(
        hidden_size=32,
        num_attention_heads=4,
        intermediate_size=64,
        num_hidden_layers=1,
        attn_implementation="sdpa",
    )
    check(bert.BertLayer(config).train(), torch.randn(2, 16, 32, requires_grad=True))


def test_a_t5_layer_of_transformers_saves_what_a_real_run_saves() -> None:
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    config = t5.T5Config(d_model=32, d_kv=8, num_heads=4, d_ff=64, num_layers=1)
    config._attn_implementation = "eager"

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = t5.T5Block(config, has_relative_attention_bias=True)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            first: torch.Tensor = self.layer(hidden)[0]
            return first

    check(Encoder().train(), torch.randn(2, 16, 32, requires_grad=True))


def test_memory_tracker_sees_the_saved_bytes_and_the_output_as_activations() -> None:
    """The bound is 0: what the tracker counts is what is saved, and the layer's output."""
    layer, hidden = GptLayer(64, 4), torch.randn(2, 16, 64, requires_grad=True)
    tracker = MemTracker()
    tracker.track_external(layer, hidden)
    with tracker:
        output = layer(hidden)
        now = tracker.get_tracker_snapshot("current")[hidden.device]
    cost = cost_of(layer, hidden)
    activations = {str(kind): size for kind, size in now.items()}["_MemRefType.ACT"]
    assert activations == cost.saved + cost.output_bytes
    assert cost.output_bytes == output.nbytes


def test_parameters_and_buffers_are_not_counted_and_a_storage_counts_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4))
            self.scale = nn.Buffer(torch.randn(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.exp(x * self.weight * self.scale)
            return y * y.view(4, 8).T

    x = torch.randn(8, 4, requires_grad=True)
    cost = cost_of(Twice(), x)
    assert (cost.saved, cost.saved_inputs) == really_saved(Twice(), x) == (128, 128)


def test_what_only_leads_to_a_dropped_value_is_not_kept() -> None:
    class Dropped(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch.exp(x)
            return torch.tanh(x)

    cost = cost_of(Dropped(), torch.randn(8, requires_grad=True))
    assert (cost.saved, cost.saved_outputs, cost.kept_outputs) == (32, 32, (0,))


def test_a_value_between_two_blocks_is_counted_on_both_sides() -> None:
    class Chain(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.silu(torch.tanh(x) * 2).exp()

    whole = capture(Chain(), torch.randn(8, 4, requires_grad=True))
    tanh, double, silu, exp = whole.nodes
    first = whole.cost(nodes=[tanh], outputs=[tanh])
    middle = whole.cost(nodes=[double, silu], inputs=[tanh], outputs=[silu])
    last = whole.cost(nodes=[exp], inputs=[silu], outputs=[exp])
    assert (first.kept_inputs, first.kept_outputs) == ((), (0,))
    assert (middle.kept_inputs, middle.kept_outputs) == ((), ())
    assert (last.kept_inputs, last.kept_outputs) == ((), (0,))
    assert first.saved + middle.saved + last.saved == whole.cost().saved
