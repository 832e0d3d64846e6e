"""The exhibition: what is emitted for five models, word for word. See tests/golden/codegen.

The plans are written by hand, so that no solver and no cost can change what is shown.
"""

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from parcompiler.instruction import parse
from parcompiler.models import gpt, resnet, t5
from tests import zoo
from tests.codegen import models
from tests.codegen.emitting import files_of, graph_of, lowered_by

Stages = list[list[str]]
RULES = "E,F,W,UP,B"


def own_gpt() -> tuple[nn.Module, Any, Stages]:
    config = gpt.Config(layers=4, heads=2, hidden=16, vocabulary=96, sequence=12, tied=True)
    first = ["embedding+positions", "layers.0", "layers.1"]
    second = ["layers.2", "layers.3", "norm+embedding"]
    inputs = {"tokens": zoo.tokens(), "labels": zoo.tokens()}
    return gpt.GPT(config), inputs, [first, second]


def own_t5() -> tuple[nn.Module, Any, Stages]:
    config = t5.Config(layers=2, heads=2, hidden=16, vocabulary=96, sequence=12)
    inputs = {n: zoo.tokens() for n in ("tokens", "decoder_tokens", "labels")}
    stages = [
        ["embedding+encoder_bias", "encoder_layers.0"],
        ["encoder_layers.1", "embedding+decoder_bias"],
        ["decoder_layers.0"],
        ["decoder_layers.1", "decoder_norm+embedding"],
    ]
    return t5.T5(config), inputs, stages


def own_resnet() -> tuple[nn.Module, Any, Stages]:
    _, inputs = zoo.build("resnet")
    model = resnet.ResNet(resnet.PRESETS["tiny"])
    return model, inputs, [["conv+norm", "stages.0"], ["stages.1", "head"]]


def albert() -> tuple[nn.Module, Any, Stages]:
    first = ["words", "layers.0", "layers.0@1", "layers.0@2"]
    return models.Albert(), models.tokens(), [first, ["layers.0@3", "words#2"]]


def regions() -> tuple[nn.Module, Any, Stages]:
    return models.Regions(), models.signals(), [["conv", "mixers.0"], ["mixers.1", "head"]]


EXHIBITS: dict[str, Callable[[], tuple[nn.Module, Any, Stages]]] = {
    "gpt": own_gpt,
    "t5": own_t5,
    "resnet": own_resnet,
    "albert": albert,
    "regions": regions,
}


@cache
def emitted(name: str) -> dict[str, str]:
    model, inputs, stages = EXHIBITS[name]()
    return files_of(lowered_by(graph_of(model.train(), inputs), stages))


@pytest.mark.parametrize("file", ["stage_0.py", "stage_1.py", "rank_0.py", "main.py", "README.md"])
@pytest.mark.parametrize("name", EXHIBITS)
def test_the_emitted_code_is_golden(
    name: str, file: str, golden: Callable[[str, str], None]
) -> None:
    golden(f"codegen/{name}/{file}", emitted(name)[file])


def test_t5_shows_its_decoder(golden: Callable[[str, str], None]) -> None:
    golden("codegen/t5/stage_3.py", emitted("t5")["stage_3.py"])


@cache
def split_gpt() -> dict[str, str]:
    """A GPT whose backward comes in two parts."""
    model, inputs, stages = own_gpt()
    return files_of(lowered_by(graph_of(model.train(), inputs), stages, schedule="zb-h1"))


def test_linear_layers_of_a_split_backward_are_those_of_the_runtime(
    golden: Callable[[str, str], None],
) -> None:
    golden("codegen/gpt-zb-h1/stage_0.py", split_gpt()["stage_0.py"])


@cache
def recomputing_gpt() -> dict[str, str]:
    """A GPT with a stage that keeps the activations of its last layer only."""
    model, inputs, (first, second) = own_gpt()
    stages = [[*first, second[0]], second[1:]]
    graph = graph_of(model.train(), inputs)
    return files_of(lowered_by(graph, stages, recompute=first))


def test_layers_that_are_recomputed_are_called_by_the_runtime(
    golden: Callable[[str, str], None],
) -> None:
    golden("codegen/gpt-recompute/stage_0.py", recomputing_gpt()["stage_0.py"])


@cache
def replicated_gpt() -> dict[str, str]:
    """A GPT on two pipeline coordinates, each with two data ranks."""
    model, inputs, stages = own_gpt()
    return files_of(lowered_by(graph_of(model.train(), inputs), stages, data=2))


@pytest.mark.parametrize("file", ["rank_2.py", "rank_3.py", "main.py", "README.md"])
def test_data_ranks_run_the_same_stages_with_peers_of_their_own(
    file: str, golden: Callable[[str, str], None]
) -> None:
    golden(f"codegen/gpt-data/{file}", replicated_gpt()[file])
    assert [name for name in replicated_gpt() if name.startswith("stage")] == [
        "stage_0.py",
        "stage_1.py",
    ]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The files of every exhibit, and of a Hugging Face model, in folders of their own."""
    root = tmp_path_factory.mktemp("emitted")
    texts = {name: emitted(name) for name in EXHIBITS}
    texts |= {"gpt-zb-h1": split_gpt(), "gpt-recompute": recomputing_gpt()}
    texts |= {"gpt-data": replicated_gpt()}
    texts |= {"hf-gpt2": hugging_face_gpt2()}
    for name, files in texts.items():
        (root / name).mkdir()
        for file, text in files.items():
            (root / name / file).write_text(text, encoding="utf-8")
    yield root
    shutil.rmtree(root)


def hugging_face_gpt2() -> dict[str, str]:
    graph = graph_of(*zoo.build("hf-gpt2"))
    first = ["wte+wpe", "transformer.h.0", "transformer.h.1"]
    return files_of(lowered_by(graph, [first, ["transformer.h.2", "transformer.h.3", "ln_f+wte"]]))


def ruff(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ruff", *arguments, "--isolated", "--line-length", "100"]
    return subprocess.run([*command, str(folder)], capture_output=True, text=True, check=False)


def test_ruff_finds_nothing_in_emitted_code(folders: Path) -> None:
    found = ruff(folders, "check", "--select", RULES, "--output-format", "concise")
    assert found.returncode == 0, found.stdout


def test_emitted_code_is_formatted_as_ruff_formats(folders: Path) -> None:
    found = ruff(folders, "format", "--diff")
    assert found.returncode == 0, found.stdout


@pytest.mark.parametrize("name", EXHIBITS)
def test_every_emitted_file_compiles(name: str) -> None:
    for file, text in emitted(name).items():
        if file.endswith(".py"):
            compile(text, file, "exec")
            assert "torch.ops" not in text


@pytest.mark.parametrize("name", EXHIBITS)
def test_the_instruction_tables_read_back(name: str) -> None:
    model, inputs, stages = EXHIBITS[name]()
    lowered = lowered_by(graph_of(model.train(), inputs), stages)
    for rank, instructions in enumerate(lowered.instructions):
        text = emitted(name)[f"rank_{rank}.py"]
        table = text.partition('INSTRUCTIONS = """\n')[2].partition('"""')[0]
        assert parse(table) == instructions
