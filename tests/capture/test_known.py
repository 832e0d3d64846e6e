"""Questions about values: answered from constants and for assertions, refused for the batch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from parcompiler.capture import capture
from parcompiler.capture.prologue import constants
from parcompiler.errors import CaptureError
from tests.distributed.models import WIDTH, rows

Step = Callable[[torch.Tensor], torch.Tensor]


class Asking(nn.Module):
    """A layer, and in front of it a step that asks for values."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.step = step
        self.linear = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(self.step(x)).sum()
        return result


def operators(step: Step) -> list[str]:
    graph = capture(Asking(step), {"x": rows(WIDTH)})
    return [str(n.target) for n in graph.fx_graph.nodes if n.op == "call_function"]


def from_constants(x: torch.Tensor) -> torch.Tensor:
    mask = torch.zeros(3, WIDTH)
    mask[0] = torch.arange(WIDTH)
    if (mask[1:] > 0).any():
        return x.sin()
    return x.cos() if mask.sum().item() == 28 else x


def from_shapes(x: torch.Tensor) -> torch.Tensor:
    return x.cos() if torch.ones_like(x).all() else x.sin()


GRID = [[2, 1, 4], [1, 1, 0]]  # of images: frames, rows and columns


def split_by_a_grid(x: torch.Tensor) -> torch.Tensor:
    return by_grid(x, torch.tensor(GRID))


def by_grid(x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    """As vision-language models of Hugging Face read the sizes of images."""
    areas = torch.repeat_interleave(grid[:, 1] * grid[:, 2], grid[:, 0])
    bounds = nn.functional.pad(areas.cumsum(0), (1, 0))
    parts = x.split((bounds[1:] - bounds[:-1]).tolist(), 1)
    sizes: Any = grid[0]
    frames, height, width = sizes
    parts[0].view(len(x), height, width)
    images = parts[0].reshape(-1, frames // 2, height, width)
    assert isinstance(areas.shape[0], int)
    places = torch.arange(int(areas.sum()))[width:]
    if torch.nonzero(areas).shape[0] == len(areas) or places.numel() != 4:
        return x.sin()
    found: torch.Tensor = torch.cat([part.cos() for part in parts], 1) + images.sum() * areas.sum()
    return found


def gathering_numbers(x: torch.Tensor) -> torch.Tensor:
    sizes = torch.tensor([row.sum() for row in torch.tensor(GRID)])
    return x.cos() if sizes.tolist() == [7, 2] else x.sin()


def of_a_typed_constructor(x: torch.Tensor) -> torch.Tensor:
    width = torch.IntTensor([WIDTH])  # which torch traces by operators of its own
    return x.cos() * torch.ones_like(x)[:, : width[0]]


def overwritten_by_an_operator(x: torch.Tensor) -> torch.Tensor:
    mask = torch.zeros(WIDTH)
    torch.ops.aten.copy_.default(mask, x[0])
    return x.cos() if mask.any() else x.sin()


def padding(x: torch.Tensor) -> torch.Tensor:
    sizes: Any = torch.tensor(2), torch.tensor(3) - 1
    x = nn.functional.pad(x.cos(), sizes, mode="reflect")
    return x[:, torch.tensor(4) :] if x.shape[-1] == WIDTH + 4 else x.sin()


def asserting(x: torch.Tensor) -> torch.Tensor:
    assert (x < 9).all(), "large"
    assert not (x > 9).any()
    assert torch.all(x < 9).item()
    return x.cos()


def refusing(x: torch.Tensor) -> torch.Tensor:
    if (x > 9).any() or x.max() > 9:
        raise ValueError
    if not (x < 9).all():
        message = f"large: {x.shape}"
        raise ValueError(message)
    return x.cos()


def checking_numbers(x: torch.Tensor) -> torch.Tensor:
    return x.cos() if x.isfinite().all() and not torch.isnan(x).any() else x.sin()


def dropping_never(x: torch.Tensor) -> torch.Tensor:
    return x.sin() if torch.rand([]) < 0.0 else x.cos()


@pytest.mark.parametrize(
    "step",
    [
        from_constants,
        from_shapes,
        split_by_a_grid,
        gathering_numbers,
        of_a_typed_constructor,
        padding,
        asserting,
        refusing,
        checking_numbers,
        dropping_never,
    ],
)
def test_what_is_known_is_answered(step: Step) -> None:
    found = operators(step)
    assert "aten.cos.default" in found
    assert "aten.sin.default" not in found


class Fixed(nn.Module):
    """A model with a grid of its own."""

    grid: torch.Tensor

    def __init__(self, kind: str, *, written: bool = False, grid: list[list[int]] = GRID) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 1)
        self.written = written
        if kind == "attribute":
            self.grid = torch.tensor(grid)
        else:
            self.register_buffer("grid", torch.tensor(grid), persistent=kind == "saved buffer")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = by_grid(x, self.grid)
        if self.written:
            self.grid[1].add_(1)
        result: torch.Tensor = self.linear(x).sum()
        return result


@pytest.mark.parametrize("kind", ["attribute", "buffer"])
def test_tensors_of_the_model_that_nothing_changes_are_known(kind: str) -> None:
    graph = capture(Fixed(kind), {"x": rows(WIDTH)})
    assert "aten.sin.default" not in [str(n.target) for n in graph.fx_graph.nodes]
    # Everything that follows from the grid is computed once.
    made = {node.name: node for node in constants(graph)}
    assert made["repeat_interleave"].meta["val"].shape == (3,)


@pytest.mark.parametrize("kind", ["attribute", "buffer", "saved buffer"])
def test_tensors_of_the_model_that_may_change_are_not_known(kind: str) -> None:
    model = Fixed(kind, written=kind != "saved buffer")
    with pytest.raises(CaptureError, match="values of tensors"):
        capture(model, {"x": rows(WIDTH)})


def test_a_counter_beside_known_values_is_captured() -> None:
    class Counting(Asking):
        steps: torch.Tensor

        def __init__(self) -> None:
            super().__init__(from_constants)
            self.register_buffer("steps", torch.tensor(0), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.steps += 1
            return super().forward(x) * self.steps

    graph = capture(Counting(), {"x": rows(WIDTH)})
    assert [item.name for item in graph.parameters if item.mutated] == ["steps"]


def test_equal_layers_with_other_known_values_are_not_copied() -> None:
    class Deciding(nn.Module):
        def __init__(self, sine: bool) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.register_buffer("sine", torch.tensor(sine), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.linear(x.sin() if self.sine else x.cos())
            return found

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Deciding(i == 3) for i in range(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x.sum()

    graph = capture(Layers(), {"x": rows(WIDTH)})
    names = [str(n.target).split(".")[1] for n in graph.fx_graph.nodes if n.op == "call_function"]
    assert [name for name in names if name in ("sin", "cos")] == ["cos"] * 3 + ["sin"] + ["cos"] * 4


def branching(x: torch.Tensor) -> torch.Tensor:
    return x.cos() if x.sum() > 0 else x.sin()


def branching_on_a_mixture(x: torch.Tensor) -> torch.Tensor:
    mask = torch.zeros(WIDTH)
    view = mask[0]
    mask[0] = x.sum()
    return x.cos() if view > 0 else x.sin()


def raising_after_work(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        x = x.sin()
    return x.cos()


def dropping_sometimes(x: torch.Tensor) -> torch.Tensor:
    return x.sin() if torch.rand([]) < 0.5 else x.cos()


def ambiguous(x: torch.Tensor) -> torch.Tensor:
    if not (x < 9).all() or (x > 9).any():
        raise ValueError
    return x


@pytest.mark.parametrize(
    "step",
    [
        branching,
        branching_on_a_mixture,
        raising_after_work,
        dropping_sometimes,
        ambiguous,
        overwritten_by_an_operator,
    ],
)
def test_what_the_batch_decides_is_refused(step: Step) -> None:
    by = "random number" if step is dropping_sometimes else "values of tensors"
    with pytest.raises(CaptureError, match=by) as error:
        operators(step)
    assert "test_known.py" in str(error.value)


class Experts(nn.Module):
    """A mixture whose experts take their rows one after the other."""

    def __init__(self, *, hit: bool) -> None:
        super().__init__()
        self.hit = hit
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.Parameter(torch.randn(4, WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        mask = nn.functional.one_hot(chosen, 4).permute(2, 1, 0)
        hit = torch.greater(mask.sum((-1, -2)), 0).nonzero() if self.hit else range(4)
        out = torch.zeros_like(x)
        for expert in hit:
            place, row = torch.where(mask[expert].squeeze(0))
            found = x[row] @ self.experts[expert].squeeze(0)
            out.index_add_(0, row, found * weights[row, place, None])
        return out.sum()


def test_a_loop_over_all_experts_is_captured_and_one_over_those_hit_named() -> None:
    assert capture(Experts(hit=False), {"x": rows(WIDTH)}).parameters
    with pytest.raises(CaptureError, match=r"for expert in range(?s:.*)for expert in hit"):
        capture(Experts(hit=True), {"x": rows(WIDTH)})


def test_a_list_of_tensors_as_an_index_is_named() -> None:
    def indexing(x: torch.Tensor) -> torch.Tensor:
        best = (x.argmax(-1) % 2).unbind()
        return torch.index_put(x, (torch.tensor(best), torch.tensor(best)), x[0, 0])

    with pytest.raises(
        CaptureError, match=r"made of a list of tensors, .*: make it with torch.stack"
    ):
        operators(indexing)


def test_a_large_constant_is_not_computed() -> None:
    def large(x: torch.Tensor) -> torch.Tensor:
        return x.cos() if torch.ones(1 << 12, 1 << 12).all() else x.sin()

    with pytest.raises(CaptureError):
        operators(large)


def test_the_generator_is_left_alone() -> None:
    model = Asking(lambda x: x + torch.bernoulli(torch.full((WIDTH,), 0.5)) + torch.rand(WIDTH))
    torch.manual_seed(3)
    wanted = torch.rand(2)
    torch.manual_seed(3)
    capture(model, {"x": rows(WIDTH)})
    assert torch.equal(torch.rand(2), wanted)


class Prepared(nn.Module):
    """Branches on whether it has been prepared."""

    def __init__(self, *, persistent: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 1)
        self.register_buffer("ready", torch.tensor(True), persistent=persistent)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.ready else x - x.mean()
        result: torch.Tensor = self.linear(x).sum()
        return result


def test_a_branch_on_a_buffer_that_is_saved_says_how_it_becomes_a_constant() -> None:
    model = nn.Sequential(Prepared(persistent=True))
    with pytest.raises(CaptureError, match=r"buffer '0\.ready', .* register it with persistent=F"):
        capture(model, (rows(WIDTH),))
    capture(nn.Sequential(Prepared(persistent=False)), (rows(WIDTH),))
