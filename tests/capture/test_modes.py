"""A program computes in the modes that the model's modules had, and says what that leaves out."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import parcompiler as pc
from parcompiler.capture.modes import in_modes, modes_of
from parcompiler.graph import Modes
from parcompiler.report import Report


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.drop(self.norm(self.linear(x)))
        return x + y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def inputs() -> tuple[Tensor]:
    return (torch.randn(4, 4),)


def frozen() -> Model:
    """It trains, but for its batch norms."""
    model = Model()
    for module in model.modules():
        module.train(not isinstance(module, nn.BatchNorm1d))
    return model


def test_modules_in_evaluation_mode_are_counted_by_what_that_changes() -> None:
    model = nn.ModuleDict(
        {
            "drops": nn.Dropout(0.1), "keeps all": nn.Dropout(0.0), "lstm": nn.LSTM(2, 2, 2),
            "norm": nn.BatchNorm2d(2), "of the batch": nn.BatchNorm2d(2, track_running_stats=False),
            "attention": nn.MultiheadAttention(2, 1, dropout=0.1), "layer norm": nn.LayerNorm(2),
        }
    )  # fmt: skip
    assert modes_of(model) == Modes()
    modes = modes_of(model.eval())
    assert (modes.dropouts, modes.norms, modes.outermost) == (2, 1, ("",))


def test_a_model_in_evaluation_mode_is_never_compiled_in_silence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pc.compile(Model(), pc.Mesh(), inputs(), microbatches=1)
    assert capsys.readouterr().err == ""
    program = pc.compile(Model().eval(), pc.Mesh(), inputs(), microbatches=1, progress=False)
    said = capsys.readouterr().err
    assert said.startswith("parcompiler: the model is in evaluation mode")
    assert "(modules with p > 0: 4)" in said
    assert "keep their statistics (modules: 4); call model.train() before compile" in said
    pc.compile(program, pc.Mesh(), microbatches=1, precision="bf16")
    assert capsys.readouterr().err == said
    cluster = pc.Cluster(nodes=1, devices_per_node=2, device="cpu")
    pc.compile(Model().eval(), cluster, inputs(), microbatches=4, microbatch="auto")
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("make", [frozen, lambda: Model().eval()], ids=["norms", "all"])
def test_the_modes_are_those_of_the_capture_whatever_the_model_does_later(make) -> None:  # type: ignore[no-untyped-def]
    model = make()
    program = pc.compile(model, pc.Mesh(pipeline=2), inputs(), microbatches=2)
    captured = modes_of(model)
    later = modes_of(model.eval() if model.training else model.train())
    assert later != captured
    assert program.captured.modes == captured
    assert program.verify().ok
    again = pc.compile(program, pc.Mesh(), microbatches=2, precision="bf16")
    assert again.captured.modes == captured
    assert modes_of(model) == later


def test_modes_are_restored_whatever_happens() -> None:
    model = frozen()
    before = modes_of(model)
    with pytest.raises(KeyError), in_modes(model, Modes(evaluating=("layers.1",))):
        assert modes_of(model).evaluating == ("layers.1",)
        raise KeyError
    assert modes_of(model) == before


def test_the_report_says_which_modules_are_in_evaluation_mode(tmp_path: Path) -> None:
    report = pc.compile(frozen(), pc.Mesh(), inputs(), microbatches=1).report()
    words = "training; in evaluation mode: layers.0.norm … layers.3.norm (4) (dropouts"
    assert words in " ".join(str(report).replace("...", "…").split())
    assert Report.from_json(report.to_json()).model == report.model
    page = tmp_path / "report.html"
    report.to_html(page)
    assert words in page.read_text(encoding="utf-8").replace("<wbr>", "")
    program = pc.compile(Model().eval(), pc.Mesh(), inputs(), microbatches=1)
    whole = "evaluation (dropouts that do not act: 4, norms that keep their statistics: 4)"
    assert whole in str(program.report())
    folder = program.export(tmp_path / "out")
    assert whole in (folder / "README.md").read_text(encoding="utf-8")
    assert whole in str(pc.load(folder).report())
    assert "mode" not in pc.compile(Model(), pc.Mesh(), inputs()).report().to_text().split()
