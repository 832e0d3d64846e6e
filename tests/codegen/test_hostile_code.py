"""Names from a model are data: whatever they are, the code compiles, runs and does nothing else."""

import builtins
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

import parcompiler as pc
from parcompiler.capture.blocks import cut
from parcompiler.graph import Graph
from tests.codegen.emitting import files_of, graph_of, lowered_by

WIDTH = 4
TRIGGER = "parcompiler_was_here"  # what names would leave behind if they were run

MODULES = (
    f'x"; import builtins; setattr(builtins, "{TRIGGER}", 1); "',
    f"a\nimport builtins\nsetattr(builtins, '{TRIGGER}', 1)\n",
    f'"""; __import__("builtins"); setattr(__builtins__, "{TRIGGER}", 1); """',
    'three """ quotes """',
    "back\\slash\\",
    "{{ lowered }} {% raw %} {braces} {0}",
    "größe",
    "class",
    "lambda",
    "self",
    "torch",
    "F",
    "nn",
    "runtime",
    "Tensor",
    "Stage0",
    "DEVICE",
    "names_",
    "<script>alert(1)</script>",
    "`code` | cell |",
    "```",
    "\u202egnp",
    "x y",
    "layer",
)
PARAMETERS = (
    "names",
    "inputs",
    "receives",
    "gives",
    "random",
    "scopes",
    "loss",
    "weight ",
    'weight"',
    "weight'\n",
    "_parameters_",
    "1",
    "{weight}",
    "None",
)


class Odd(nn.Module):
    """A linear layer whose weight has any name."""

    def __init__(self, name: str = "weight") -> None:
        super().__init__()
        self.name = name
        self.register_parameter(name, nn.Parameter(torch.eye(WIDTH) + 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(F.linear(x, dict(self.named_parameters())[self.name]))


class Named(nn.Module):
    """Layers under hostile names, one after the other."""

    def __init__(self, modules: tuple[str, ...], parameters: tuple[str, ...]) -> None:
        super().__init__()
        for name in modules:
            self.add_module(name, Odd())
        self.zero = Odd("grad")  # as one word a method of every module
        self.register = Odd("buffer")
        self.order = (*modules, "zero", "register")
        self.odd = nn.ModuleList(Odd(name) for name in parameters)

    def forward(self, x: Tensor) -> Tensor:
        for name in self.order:
            x = self.get_submodule(name)(x)
        for layer in self.odd:
            x = layer(x)
        return F.mse_loss(x, torch.zeros_like(x))


class Top(nn.Module):
    """Parameters of the model itself under names that modules have for something else."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        for name in PARAMETERS:
            if not hasattr(self, name):
                self.register_parameter(name, nn.Parameter(torch.full((WIDTH,), 0.5)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for name, parameter in self.named_parameters(recurse=False):
            x = x * parameter if len(name) % 2 else x + parameter
        x = self.second(x)
        return F.mse_loss(x, torch.zeros_like(x))


def example(rows: int = 2) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(0))}


def halves(names: list[str]) -> list[list[str]]:
    return [names[: len(names) // 2], names[len(names) // 2 :]]


def whole_program(model: nn.Module, inputs: Any) -> pc.Program:
    return pc.compile(
        model, pc.Mesh(pipeline=2), inputs, schedule="1f1b", microbatches=2, progress=False
    )


@pytest.fixture(autouse=True)
def nothing_was_run() -> Iterator[None]:
    """No name from a model has left its mark in this process."""
    yield
    assert not hasattr(builtins, TRIGGER)


def hostile_models() -> dict[str, Callable[[], nn.Module]]:
    named = type('Evil"""; raise SystemExit\n', (Named,), {})
    named.__qualname__ = named.__name__
    return {
        "modules": lambda: named(MODULES[: len(MODULES) // 2], ("weight", "names")),
        "more modules": lambda: Named(MODULES[len(MODULES) // 2 :], ("weight",)),
        "parameters": lambda: Named(("a",), PARAMETERS),
        "parameters of the model": Top,
    }


@pytest.mark.parametrize("kind", hostile_models())
def test_a_hostile_model_is_exported_proved_and_keeps_its_names(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = hostile_models()[kind]()
    program = whole_program(model, example())
    found = program.verify()
    assert found.ok, str(found)
    program.export(tmp_path / "out")
    stored: dict[str, Tensor] = {}
    for path in sorted((tmp_path / "out" / "weights").iterdir()):
        stored |= load_file(path)
    assert stored.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(stored[name], tensor)
    for rank in range(2):
        assert pc.load(tmp_path / "out").instructions(rank)
    for path in (tmp_path / "out").glob("*.py"):
        tree = compile(path.read_text(encoding="utf-8"), path.name, "exec")
        assert TRIGGER not in tree.co_names


def test_the_reference_keeps_original_names_through_a_step() -> None:
    """`verify` compares the state dict that rank 0 gathers with the model's, name by name."""
    model = Named(MODULES[:4], PARAMETERS[:4])
    found = whole_program(model, example()).verify()
    assert found.ok
    assert found.parameter_error <= 1e-9


def test_names_that_emitted_code_uses_are_given_way() -> None:
    graph = graph_of(Named(("self", "torch", "F", "nn", "Stage0"), ("names",)), example())
    files = files_of(lowered_by(graph, halves(blocks_of(graph))))
    for name, text in files.items():
        if name.startswith("stage_"):
            space: dict[str, Any] = {}
            exec(compile(text, name, "exec"), space)
            (stage,) = [v for n, v in space.items() if re.fullmatch(r"Stage\d", n)]
            made = stage()
            assert made.training is True
            assert callable(made.zero_grad)


def blocks_of(graph: Graph) -> list[str]:
    return [block.name for block in cut(graph, 1).blocks]


class Keyed(nn.Module):
    """Takes tensors in a dict, under whatever keys it has."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        first, second = batch.values()
        return F.mse_loss(self.second(self.first(first).relu()), second)


@pytest.mark.parametrize(
    "keys", [("a b", "it's\n"), ('say "hi"', "back\\slash"), ("class", "{}"), ("self", "torch")]
)
def test_a_batch_may_have_any_keys(
    keys: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = {"batch": {key: example()["x"] for key in keys}}
    program = whole_program(Keyed(), inputs)
    program.export(tmp_path / "out")
    for name in [name for name in sys.modules if name.startswith("stage_")]:
        del sys.modules[name]
    monkeypatch.syspath_prepend(tmp_path / "out")
    inputs_of_rank = runpy.run_path(str(tmp_path / "out" / "rank_0.py"))["INPUTS"]
    assert {item.key for item in inputs_of_rank.values()} == {f"batch.{key}" for key in keys}
    if keys[0] == "a b":
        assert program.verify().ok


class Reserved(nn.Module):
    """Arguments that are called like what emitted code uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(
        self, torch: Tensor, F: Tensor, nn: Tensor, device: Tensor, layer: Tensor
    ) -> Tensor:
        x = self.first(torch + F) * nn
        loss: Tensor = (self.second(x) - device * layer).square().mean()
        return loss


def test_arguments_may_be_called_as_emitted_code_calls_its_own() -> None:
    names = ("torch", "F", "nn", "device", "layer")
    assert whole_program(Reserved(), {name: example()["x"] for name in names}).verify().ok


@pytest.mark.parametrize("key", [f"x=setattr(builtins, {TRIGGER!r}, 1)", "a b", "class", ""])
def test_a_keyword_that_is_no_name_is_refused(key: str) -> None:
    class Open(nn.Module):
        def forward(self, **given: Tensor) -> Tensor:
            return torch.stack(list(given.values())).sum()

    with pytest.raises(pc.InputError, match="cannot be the name of an argument"):
        whole_program(Open(), {key: example()["x"]})


class Tags(HTMLParser):
    """The tags that a browser would see."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note a tag."""
        self.found.add(tag)


def test_the_readme_shows_names_as_code() -> None:
    graph = graph_of(Named(MODULES, ("weight",)), example())
    readme = files_of(lowered_by(graph, halves(blocks_of(graph))))["README.md"]
    body, _, _ = readme.partition("## Report")
    outside = re.sub(r"`[^`\n]*`", "", body)
    assert not Tags(outside).found
    assert "alert" not in outside
    rows = [line for line in body.splitlines() if line.startswith("| ")]
    assert [line.count("|") for line in rows] == [4, 4, 4]
    assert readme.count("```") == 2
