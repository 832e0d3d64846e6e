"""Stage 1 of 2 of Gemma2ForCausalLM: model.layers.2, model.layers.3, norm.

layers_1 → norm
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parcompiler import runtime

DEVICE = runtime.rank_device("cpu")


class Gemma2DecoderLayer(runtime.Layer):
    """model.layers.2, model.layers.3, from modeling_gemma2.py:307."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = nn.Module()
        self.input_layernorm.weight = nn.Parameter(torch.empty(16))
        self.self_attn = nn.Module()
        self.self_attn.q_proj = nn.Linear(16, 16, bias=False)
        self.self_attn.k_proj = nn.Linear(16, 8, bias=False)
        self.self_attn.v_proj = nn.Linear(16, 8, bias=False)
        self.self_attn.o_proj = nn.Linear(16, 16, bias=False)
        self.post_attention_layernorm = nn.Module()
        self.post_attention_layernorm.weight = nn.Parameter(torch.empty(16))
        self.pre_feedforward_layernorm = nn.Module()
        self.pre_feedforward_layernorm.weight = nn.Parameter(torch.empty(16))
        self.mlp = nn.Module()
        self.mlp.gate_proj = nn.Linear(16, 32, bias=False)
        self.mlp.up_proj = nn.Linear(16, 32, bias=False)
        self.mlp.down_proj = nn.Linear(32, 16, bias=False)
        self.post_feedforward_layernorm = nn.Module()
        self.post_feedforward_layernorm.weight = nn.Parameter(torch.empty(16))

    def forward(self, hidden_states: Tensor, cos: Tensor, sin: Tensor, where_1: Tensor) -> Tensor:
        # input_layernorm
        power = hidden_states**2
        mean = power.mean(-1, keepdim=True)
        total = mean + 1e-06
        rsqrt = torch.rsqrt(total)
        output = hidden_states * rsqrt
        total = self.input_layernorm.weight + 1.0
        output = output * total

        # self_attn
        q_proj = self.self_attn.q_proj(output)
        query_states = q_proj.view(*q_proj.shape[:2], -1, 4)
        query_states = query_states.transpose(1, 2)
        k_proj = self.self_attn.k_proj(output)
        key_states = k_proj.view(*k_proj.shape[:2], -1, 4)
        key_states = key_states.transpose(1, 2)
        v_proj = self.self_attn.v_proj(output)
        value_states = v_proj.view(*v_proj.shape[:2], -1, 4)
        value_states = value_states.transpose(1, 2)
        cos = cos.unsqueeze(1)
        sin = sin.unsqueeze(1)
        product = query_states * cos
        part = query_states[..., :2]
        part_2 = query_states[..., 2:]
        negative = -part_2
        joined = torch.cat([negative, part], dim=-1)
        product_2 = joined * sin
        query_states = product + product_2
        product = key_states * cos
        part = key_states[..., :2]
        part_2 = key_states[..., 2:]
        negative = -part_2
        joined = torch.cat([negative, part], dim=-1)
        product_2 = joined * sin
        key_states = product + product_2
        key_states = key_states.unsqueeze(2)
        key_states = key_states.expand(-1, -1, 2, -1, -1)
        key_states = key_states.reshape(key_states.shape[0], 4, 12, 4)
        value_states = value_states.unsqueeze(2)
        value_states = value_states.expand(-1, -1, 2, -1, -1)
        value_states = value_states.reshape(value_states.shape[0], 4, 12, 4)
        key_states = key_states.transpose(2, 3)
        matmul = query_states @ key_states
        product = matmul * 0.0625
        ratio = product / 50.0
        tanh = torch.tanh(ratio)
        product = tanh * 50.0
        total = product + where_1
        softmax = F.softmax(total, dim=-1, dtype=torch.float32)
        matmul = softmax @ value_states
        matmul = matmul.transpose(1, 2)
        matmul = matmul.contiguous()
        attn_output = matmul.reshape(*matmul.shape[:2], -1)
        attn_output = self.self_attn.o_proj(attn_output)

        # post_attention_layernorm
        power = attn_output**2
        mean = power.mean(-1, keepdim=True)
        total = mean + 1e-06
        rsqrt = torch.rsqrt(total)
        output = attn_output * rsqrt
        total = self.post_attention_layernorm.weight + 1.0
        output = output * total

        hidden_states = hidden_states + output

        # pre_feedforward_layernorm
        power = hidden_states**2
        mean = power.mean(-1, keepdim=True)
        total = mean + 1e-06
        rsqrt = torch.rsqrt(total)
        output = hidden_states * rsqrt
        total = self.pre_feedforward_layernorm.weight + 1.0
        output = output * total

        # mlp
        gate_proj = self.mlp.gate_proj(output)

        # mlp.act_fn
        act_fn = F.gelu(gate_proj, approximate="tanh")

        # mlp
        up_proj = self.mlp.up_proj(output)
        down_proj = act_fn * up_proj
        down_proj = self.mlp.down_proj(down_proj)

        # post_feedforward_layernorm
        power = down_proj**2
        mean = power.mean(-1, keepdim=True)
        total = mean + 1e-06
        rsqrt = torch.rsqrt(total)
        output = down_proj * rsqrt
        total = self.post_feedforward_layernorm.weight + 1.0
        output = output * total

        hidden_states = hidden_states + output
        return hidden_states


class Norm(runtime.Layer):
    """norm, from modeling_gemma2.py:58."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.norm = nn.Module()
        self.model.norm.weight = nn.Parameter(torch.empty(16))

    def forward(self, hidden_states: Tensor) -> Tensor:
        # model.norm
        power = hidden_states**2
        mean = power.mean(-1, keepdim=True)
        total = mean + 1e-06
        rsqrt = torch.rsqrt(total)
        output = hidden_states * rsqrt
        total = self.model.norm.weight + 1.0
        output = output * total

        output = output.reshape(-1, 16)
        return output


class Stage1(runtime.Stage):
    """Stage 1 of 2 of Gemma2ForCausalLM: model.layers.2, model.layers.3, norm."""

    receives = ("layers_1",)
    gives = ("norm",)
    scopes = {
        "layers_2": "model.layers.2",
        "layers_3": "model.layers.3",
        "norm": "",
    }

    names = {
        "model_rotary_emb_inv_freq": "model.rotary_emb.inv_freq",
    }

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("model_rotary_emb_inv_freq", torch.empty(2))
        self.layers_2 = Gemma2DecoderLayer()
        self.layers_3 = Gemma2DecoderLayer()
        self.norm = Norm()

    def constants(self) -> tuple[Tensor, ...]:
        # Computed once: no input, no parameter.
        position_ids = torch.arange(12, device=DEVICE)
        position_ids = position_ids.unsqueeze(0)
        expand = position_ids.expand(2, -1)
        part = expand[:, :1]
        difference = part - 1
        diff = torch.diff(expand, prepend=difference)
        differs = diff != 1
        cumsum = torch.cumsum(differs, dim=-1)
        arange = torch.arange(2, device=DEVICE)
        arange = arange.unsqueeze(1)
        arange = arange.unsqueeze(2)
        arange = arange.unsqueeze(3)
        unsqueeze = position_ids.unsqueeze(1)
        unsqueeze_2 = unsqueeze.unsqueeze(3)
        unsqueeze = unsqueeze.unsqueeze(2)
        new_ones = unsqueeze_2.new_ones((), dtype=torch.bool)
        picked = cumsum[arange, unsqueeze_2]
        picked_2 = cumsum[arange, unsqueeze]
        equal = picked == picked_2
        both = new_ones & equal
        picked = expand[arange, unsqueeze_2]
        picked_2 = expand[arange, unsqueeze]
        at_most = picked_2 <= picked
        both_2 = both & at_most
        both_2 = both_2.expand(-1, -1, -1, -1)
        zeros = torch.zeros((), dtype=torch.float32, device=DEVICE)
        where = torch.where(both_2, zeros, -3.4028234663852886e38)
        new_ones = picked.new_ones((), dtype=torch.bool)
        difference = picked - 4096
        above = picked_2 > difference
        both_2 = new_ones & above
        both_2 = both_2 & at_most
        both = both & both_2
        both = both.expand(-1, -1, -1, -1)
        where_1 = torch.where(both, zeros, -3.4028234663852886e38)
        position_ids = position_ids.unsqueeze(2)
        freqs = position_ids.to(torch.float32)
        freqs = freqs * self.model_rotary_emb_inv_freq
        emb = torch.cat([freqs, freqs], dim=-1)
        cos = torch.cos(emb)
        cos = cos * 1.0
        sin = torch.sin(emb)
        sin = sin * 1.0
        return where, where_1, cos, sin

    def forward(self, layers_1: Tensor) -> Tensor:
        where, where_1, cos, sin = self.once

        hidden_states = self.layers_2(layers_1, cos, sin, where_1)
        hidden_states = self.layers_3(hidden_states, cos, sin, where)
        norm = self.norm(hidden_states)
        return norm
