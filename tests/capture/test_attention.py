"""Attention in the form that kernels want, where a mask is the same for every batch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import parcompiler as pc
from parcompiler.capture import capture
from parcompiler.capture.attention import with_kernels
from parcompiler.capture.effects import overload_name
from parcompiler.graph import Graph
from tests.architectures import build

ROWS, LENGTH, HEADS, GROUPS, WIDTH = 2, 6, 4, 2, 4
Mask = Callable[[torch.Tensor, int], torch.Tensor | None]  # of [rows, queries, h], and keys


def places(x: torch.Tensor, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(x.shape[1])[:, None], torch.arange(keys)[None, :]


def lower(x: torch.Tensor, keys: int) -> torch.Tensor:
    query, key = places(x, keys)
    return key <= query


def floating(x: torch.Tensor, keys: int) -> torch.Tensor:
    least = torch.finfo(x.dtype).min
    mask = torch.full((x.shape[1], keys), least).triu(1)
    return mask[None, None].expand(x.shape[0], 1, -1, -1)


def negative_infinity(x: torch.Tensor, keys: int) -> torch.Tensor:
    return torch.full((x.shape[1], keys), -torch.inf).triu_(1)


def everything(x: torch.Tensor, keys: int) -> torch.Tensor:
    return torch.ones(x.shape[0], 1, x.shape[1], keys, dtype=torch.bool)


def zeros(x: torch.Tensor, keys: int) -> torch.Tensor:
    return (1.0 - torch.ones(x.shape[0], keys))[:, None, None, :] * torch.finfo(x.dtype).min


def window(x: torch.Tensor, keys: int) -> torch.Tensor:
    query, key = places(x, keys)
    return (key <= query) & (key > query - 3)


def from_the_last(x: torch.Tensor, keys: int) -> torch.Tensor:
    query, key = places(x, keys)
    return key <= query + keys - x.shape[1]


def slope(x: torch.Tensor, keys: int) -> torch.Tensor:
    query, key = places(x, keys)
    return (key - query).float().masked_fill(key > query, -torch.inf)


def one_head_sees_all(x: torch.Tensor, keys: int) -> torch.Tensor:
    return torch.stack([lower(x, keys), *[everything(x, keys)[0, 0]] * (HEADS - 1)])


def of_the_batch(x: torch.Tensor, keys: int) -> torch.Tensor:
    return lower(x, keys) & (x[:, None, :, :1] < 1e9)


def drawn(x: torch.Tensor, keys: int) -> torch.Tensor:
    return lower(x, keys) & (torch.rand(x.shape[1], keys) < 2.0)


class Attention(nn.Module):
    """One attention with groups of heads, under some mask."""

    def __init__(self, mask: Mask, keys: int = LENGTH, **options: Any) -> None:
        super().__init__()
        self.made, self.keys, self.options = mask, keys, options
        self.query = nn.Linear(HEADS * WIDTH, HEADS * WIDTH)
        self.pair = nn.Linear(HEADS * WIDTH, 2 * GROUPS * WIDTH)

    def mask(self, x: torch.Tensor) -> torch.Tensor | None:
        return self.made(x, self.keys)

    def repeated(self, x: torch.Tensor) -> torch.Tensor:
        return x.repeat_interleave(HEADS // GROUPS, dim=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query = self.query(x).view(ROWS, LENGTH, HEADS, WIDTH).transpose(1, 2)
        pair = self.pair(x[:, : self.keys]).view(ROWS, -1, 2 * GROUPS, WIDTH).transpose(1, 2)
        key, value = map(self.repeated, pair.chunk(2, dim=1))
        mask = self.mask(x)
        y = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, **self.options)
        return y.square().mean() + self.afterwards(mask)

    def afterwards(self, mask: torch.Tensor | None) -> float | torch.Tensor:
        return 0.0


class Expanded(Attention):
    """As Transformers repeats heads."""

    def repeated(self, x: torch.Tensor) -> torch.Tensor:
        rows, heads, length, width = x.shape
        times = HEADS // GROUPS
        wide = x[:, :, None, :, :].expand(rows, heads, times, length, width)
        return wide.reshape(rows, heads * times, length, width)


class Interlaced(Attention):
    """The heads of the first group are not neighbours: no groups in the sense of a kernel."""

    def repeated(self, x: torch.Tensor) -> torch.Tensor:
        return x.repeat(1, HEADS // GROUPS, 1, 1)


def x() -> torch.Tensor:
    return torch.randn(ROWS, LENGTH, HEADS * WIDTH, generator=torch.Generator().manual_seed(0))


def captured(model: nn.Module) -> Graph:
    return capture(model, (x(),))


def attention_of(graph: Graph) -> fx.Node:
    named = "scaled_dot_product_attention"
    found: list[fx.Node] = [n for n in graph.fx_graph.nodes if overload_name(n) == named]
    return found[0]


def flags(model: nn.Module, *, on_cpu: bool = True) -> dict[str, object]:
    """What the attention of a model says besides its operands."""
    return dict(attention_of(with_kernels(captured(model), on_cpu=on_cpu)).kwargs)


@pytest.mark.parametrize("mask", [lower, floating, negative_infinity])
def test_a_causal_mask_becomes_a_flag(mask: Mask) -> None:
    assert flags(Attention(mask)) == {"is_causal": True, "enable_gqa": True}


@pytest.mark.parametrize("mask", [everything, zeros])
def test_a_mask_that_hides_nothing_goes(mask: Mask) -> None:
    assert flags(Attention(mask)) == {"enable_gqa": True}


@pytest.mark.parametrize(
    "mask", [window, slope, one_head_sees_all, of_the_batch, drawn], ids=lambda mask: mask.__name__
)
def test_any_other_mask_stays_and_so_do_repeated_heads(mask: Mask) -> None:
    graph = captured(Attention(mask))
    assert with_kernels(graph, on_cpu=True) is graph


def test_a_triangle_counts_from_the_first_key() -> None:
    shorter = LENGTH - 2
    assert flags(Attention(lower, shorter)) == {"is_causal": True, "enable_gqa": True}
    graph = captured(Attention(from_the_last, shorter))
    assert with_kernels(graph, on_cpu=True) is graph
    assert "is_causal" in flags(Attention(from_the_last, LENGTH))


@pytest.mark.parametrize("kind", [Attention, Expanded])
def test_heads_are_read_in_groups_where_kernels_take_them(kind: type[Attention]) -> None:
    assert flags(kind(lambda x, keys: None)) == {"enable_gqa": True}
    assert flags(kind(lower), on_cpu=False) == {"is_causal": True}  # in float32
    assert flags(Interlaced(lower)) == {"is_causal": True}


def test_scale_and_dropout_stay() -> None:
    found = flags(Attention(lower, scale=0.5, dropout_p=0.1))
    assert found == {"is_causal": True, "enable_gqa": True, "scale": 0.5, "dropout_p": 0.1}


class Buffered(Attention):
    """A mask that is a buffer."""

    triangle: torch.Tensor

    def __init__(self, persistent: bool) -> None:
        super().__init__(lower)
        triangle = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        self.register_buffer("triangle", triangle, persistent=persistent)

    def mask(self, x: torch.Tensor) -> torch.Tensor:
        return self.triangle


def test_a_buffer_that_a_state_dict_has_is_no_constant() -> None:
    assert flags(Buffered(persistent=False)) == {"is_causal": True, "enable_gqa": True}
    graph = captured(Buffered(persistent=True))
    assert with_kernels(graph, on_cpu=True) is graph


class Overwritten(Attention):
    """A mask that hides something only after it was read."""

    def afterwards(self, mask: torch.Tensor | None) -> torch.Tensor:
        assert mask is not None
        return mask.tril_().sum()


def test_a_mask_that_is_written_later_stays() -> None:
    graph = captured(Overwritten(everything))
    assert with_kernels(graph, on_cpu=True) is graph


def test_no_mask_is_sent_and_the_model_s_own_operators_are_an_option() -> None:
    model, inputs, _ = build("mistral")
    programs = {
        exact: pc.compile(
            model, pc.Mesh(pipeline=2), inputs, microbatches=3, schedule="1f1b", exact=exact
        )
        for exact in (False, True)
    }
    for exact, program in programs.items():
        assert {value.dtype for value in program.lowered.values.values()} == {torch.float32}
        assert (len(attention_of(program.problem.graph).args) > 3) is exact
    report = str(programs[False].report())
    assert "causal kernel, recognised from a mask (4)" in report
    assert "recognised" not in str(programs[True].report())
    with pytest.raises(pc.PlanError, match="fingerprint"):
        pc.compile(programs[False], pc.Mesh(pipeline=2), plan=programs[True].plan)
    for program in programs.values():
        found = program.verify()
        assert max(found.loss_error, found.gradient_error) <= 1e-9, found.worst


def test_tensor_ranks_share_the_groups_of_heads() -> None:
    model, inputs, _ = build("mistral")  # four heads, two of keys and values
    pins = {"*[qkv]_proj.weight": "S(0)", "*o_proj.weight": "S(1)"}
    program = pc.compile(model, pc.Mesh(tensor=2), inputs, microbatches=2, sharding=pins)
    kernels = [node for node in program.lowered.graph.fx_graph.nodes if "kernel" in node.meta]
    assert [node.meta["val"].shape[1] for node in kernels] == [2] * 4
    found = program.verify()
    assert max(found.loss_error, found.gradient_error) <= 1e-9, found.worst


class Long(nn.Module):
    """Attention over so many positions that no mask of them is computed here."""

    def __init__(self, mask: Mask) -> None:
        super().__init__()
        self.mask, self.query = mask, nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.query(x).view(1, -1, 1, 8).transpose(1, 2)
        mask = self.mask(x, x.shape[1])
        return F.scaled_dot_product_attention(y, y, y, attn_mask=mask).mean()


def wide_window(x: torch.Tensor, keys: int) -> torch.Tensor:
    query, key = places(x, keys)
    return (key <= query) & (key > query - 4096)


def chunks(x: torch.Tensor, keys: int) -> torch.Tensor:
    query, key = places(x, keys)
    return (key <= query) & (key // 8192 == query // 8192)


@pytest.mark.parametrize(
    ("mask", "flag"),
    [
        (lower, {"is_causal": True}),
        (floating, {"is_causal": True}),
        (everything, {}),
        (window, None),
        (wide_window, None),
        (chunks, None),
        (slope, None),
    ],
    ids=lambda item: getattr(item, "__name__", ""),
)
def test_masks_of_many_positions_are_told_by_their_formula(
    mask: Mask, flag: dict[str, object] | None
) -> None:
    with torch.device("meta"):
        graph = capture(Long(mask), (torch.zeros(1, 40_000, 8),))
    after = with_kernels(graph, on_cpu=True)
    assert after is graph if flag is None else dict(attention_of(after).kwargs) == flag
