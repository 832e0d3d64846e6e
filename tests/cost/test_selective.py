"""Which operators run again, and how much less that keeps than the formula of Megatron-LM."""

import dataclasses
from functools import cache

import pytest
import torch

import parcompiler as pc
from parcompiler.cost import BlockCost, trace_block
from parcompiler.cost.selective import again_nodes, running_again
from parcompiler.device import device
from parcompiler.models import gpt, llama
from parcompiler.passes.shard.local import local
from tests.cost.capture import capture

# So much memory that nothing is forced.
ROOMY = dataclasses.replace(device("h100"), name="roomy", memory=2**50)


@cache
def program(name: str, tensor: int) -> pc.Program:
    """Three layers of a published size in bfloat16, without data."""
    model: torch.nn.Module
    with torch.device("meta"):
        if name == "gpt":
            small = dataclasses.replace(gpt.PRESETS["175b"], layers=3)
            model, sequence = gpt.GPT(small), small.sequence
        else:
            sizes = dataclasses.replace(llama.PRESETS[name], layers=3)
            model, sequence = llama.Llama(sizes), sizes.sequence
        tokens = torch.zeros(1, sequence, dtype=torch.long)
    return pc.compile(
        model, pc.Mesh(tensor=tensor, device=ROOMY), {"tokens": tokens, "labels": tokens},
        microbatches=1, precision="bf16", progress=False,
    )  # fmt: skip


def layer(name: str, tensor: int, *, selective: bool) -> tuple[BlockCost, float, set[str]]:
    """The cost of a layer, what s·b·h is, and the names of the operators that run again."""
    plan = dataclasses.replace(program(name, tensor).plan, selective=selective)
    problem = local(program(name, tensor).problem, plan)
    priced = problem.priced(1)
    place = next(b for b, block in enumerate(priced.cut.blocks) if block.name == "layers.1")
    block, cost = priced.cut.blocks[place], priced.costs[place]
    names = {str(node.target) for node in running_again(problem.graph, block)}
    whole = program(name, tensor).problem.graph
    width = whole.by_name["layers.1.attention_norm.weight"].numel
    tokens = next(node for node in whole.fx_graph.nodes if node.name == "tokens").meta["val"]
    return cost, float(width * tokens.numel()), names


@pytest.mark.parametrize(
    ("name", "tensor", "plain", "lean"),
    [("gpt", 1, 32.0, 20.0), ("3-8b", 1, 43.0, 25.0), ("3.1-405b", 8, 8.57, 2.94)],
)
def test_a_layer_keeps_so_many_bytes_for_each_of_s_b_h(
    name: str, tensor: int, plain: float, lean: float
) -> None:
    """Korthikanti et al. 2022 (2205.05198), equation 2, has 34 / t, 2 / t of it for dropout."""
    for selective, wanted in ((False, plain), (True, lean)):
        cost, unit, _ = layer(name, tensor, selective=selective)
        assert (cost.saved + cost.saved_inputs) / unit == pytest.approx(wanted, rel=0.01)


def test_norms_gates_and_gathers_run_again_and_products_do_not() -> None:
    _, _, names = layer("3.1-405b", 8, selective=True)
    assert names == {"aten.rms_norm.default", "aten.silu.default", "aten.mul.Tensor",
                     "runtime.all_gather"}  # fmt: skip
    plain, _, _ = layer("3.1-405b", 8, selective=False)
    lean, _, _ = layer("3.1-405b", 8, selective=True)
    flops = [sum(o.flops for o in c.backward if o.kind == "matmul") for c in (plain, lean)]
    assert flops[0] == flops[1]
    assert lean.forward == plain.forward
    gathers = [sum(o.name == "all-gather" for o in c.backward) for c in (plain, lean)]
    assert gathers[1] == gathers[0] + 2


class NormByHand(torch.nn.Module):
    """As in transformers: in float32, from a narrow input and to a narrow result."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(64))
        self.out = torch.nn.Linear(64, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
        y: torch.Tensor = self.out(self.weight * wide.to(x.dtype))
        return y


def test_of_a_value_and_its_wider_copy_the_narrow_one_is_kept() -> None:
    x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
    whole = capture(NormByHand().bfloat16(), x)
    again = again_nodes(whole.nodes, whole.inputs, whole.roles)
    plain = whole.cost()
    lean = trace_block(whole.nodes, whole.inputs, whole.outputs, whole.roles, again=again)
    assert (plain.saved, plain.saved_inputs) == (x.numel() * (4 + 2 + 2) + 32 * 4, 0)
    assert (lean.saved, lean.saved_inputs) == (32 * 4, x.nbytes)


class NormOfChosen(NormByHand):
    """The same of rows that the data choose, as the tokens of an expert."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x[x[:, 0] > 0])


def test_sizes_may_depend_on_the_data() -> None:
    x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
    whole = capture(NormOfChosen().bfloat16(), x)
    names = {str(node) for node in again_nodes(whole.nodes, whole.inputs, whole.roles)}
    assert {"to", "mul_1"} <= names, names
