"""A way with the vocabulary that was asked for: done, or kept whole with the reason, or refused."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import parcompiler as pc
from parcompiler.models import dlrm
from tests import zoo

Loss = Callable[..., torch.Tensor]
TOKENS = torch.randint(3, (2, 6), generator=torch.Generator().manual_seed(0))


class Layers(nn.Module):
    """No words at all."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


class Words(nn.Module):
    """A small language model; `loss` says what becomes of its logits."""

    def __init__(self, loss: Loss = F.cross_entropy, words: int = 40) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.table = nn.Embedding(words, 8)
        self.head = nn.Linear(8, words, bias=False)
        self.loss = loss

    def through(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.through(self.table(x))).flatten(0, 1)
        return self.loss(logits, y.flatten())


class Mixed(Words):
    """Each layer also reads the words themselves."""

    def through(self, x: torch.Tensor) -> torch.Tensor:
        words = x
        for layer in self.layers:
            x = (layer(x) + words).tanh()
        return x


@pytest.mark.parametrize("tied", [False, True])
def test_words_that_several_layers_read_stay_on_stages(tied: bool) -> None:
    """What is looked up on all ranks goes to one stage."""
    torch.manual_seed(0)
    model = Mixed()
    if tied:
        model.head.weight = model.table.weight
    program = pc.compile(
        model, pc.Mesh(pipeline=2), {"x": TOKENS, "y": TOKENS}, microbatches=2,
        vocabulary="vocab-2", precision="fp64",
    )  # fmt: skip
    choice = program.plan.vocabulary
    assert choice is not None
    assert choice.lookups == ()
    assert choice.head == (None if tied else "head.weight")
    assert any("several layers read its rows" in line for line in choice.kept)
    found = program.verify()
    assert max(found.loss_error, found.gradient_error) <= 1e-9


def with_z_loss(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, y) + 1e-4 * logits.logsumexp(-1).square().mean()


def focal(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    own = F.log_softmax(logits, -1).gather(1, y.unsqueeze(1)).squeeze(1)
    return (-((1 - own.exp()) ** 2) * own).mean()


def averaged(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return logits.square().mean() + 0 * y.sum()


class Twice(Words):
    """Reads its head a second time."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        first = self.head(self.through(self.table(x)))
        again = self.head(self.through(first.softmax(-1) @ self.head.weight))
        return F.cross_entropy(again.flatten(0, 1), y.flatten())


def compiled(model: nn.Module, ranks: int = 2, **options: Any) -> pc.Program:
    inputs = {"x": TOKENS, "y": TOKENS} if isinstance(model, Words) else {"x": torch.ones(2, 8)}
    given = {"vocabulary": "vocab-2", "microbatches": 3, **options}
    return pc.compile(model, pc.Mesh(pipeline=ranks), inputs, **given)


WHOLE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "no words": (Layers, "Layers: it looks up no words of the batch and has no head with"),
    "two terms": (lambda: Words(with_z_loss), "head.weight: the loss has other terms besides"),
    "focal": (lambda: Words(focal), "head.weight: a loss that needs whole logits (mul)"),
    "twice": (Twice, "head.weight: its weight is also read by"),
    "few words": (
        lambda: Words(words=3),
        "head.weight: V (3) is smaller than the number of ranks (4)",
    ),
}


@pytest.mark.parametrize("name", WHOLE)
def test_what_cannot_be_on_all_ranks_stays_whole_and_plan_and_report_say_why(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    make, reason = WHOLE[name]
    program = compiled(make(), ranks=4 if name == "few words" else 2)
    told = capsys.readouterr().err
    assert "vocabulary='vocab-2' does not spread " in told
    assert reason in told
    choice = program.plan.vocabulary
    assert choice is not None
    assert choice.head is None
    assert any(line.startswith(reason) for line in choice.kept), choice.kept
    text = " ".join(program.report().to_text().split())
    assert reason.partition(": ")[2] in text
    again = pc.compile(
        program, pc.Mesh(pipeline=program.plan.mesh.pipeline), vocabulary="vocab-2",
        plan=program.plan, microbatches=3,
    )  # fmt: skip
    assert again.plan.vocabulary == choice


@pytest.mark.parametrize("words", [4, 5])
def test_ranks_may_be_left_without_a_row(words: int) -> None:
    found = compiled(Words(words=words), ranks=4).verify()
    assert found.ok, str(found)
    assert max(found.loss_error, found.gradient_error, found.parameter_error) <= 1e-9


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_tables_without_a_head_keep_no_ranks_waiting(ranks: int, schedule: str) -> None:
    config = dlrm.Config(tables=(96, 40, 7, 12), hidden=8, bottom=(16,), top=(16, 8))
    with torch.device("meta"):
        numbers, rows = torch.zeros(2, config.numbers), torch.zeros(2, 4, dtype=torch.long)
        model, labels = dlrm.DLRM(config), torch.zeros(2)
    given: dict[str, Any] = {"schedule": schedule, "vocabulary": "vocab-2"}
    program = pc.compile(model, pc.Mesh(pipeline=ranks), (numbers, rows, labels), **given)
    assert program.plan.vocabulary is not None
    assert len(program.plan.vocabulary.lookups) == 4  # more than there are stages
    assert program.plan.vocabulary.head is None


def test_the_classes_of_a_picture_are_a_head_when_that_is_asked_for() -> None:
    model, inputs = zoo.build("resnet")
    program = pc.compile(
        model, pc.Mesh(pipeline=2), inputs, microbatches=3, schedule="1f1b", vocabulary="vocab-2"
    )
    assert program.plan.vocabulary is not None
    assert program.plan.vocabulary.head == "head.weight"
    found = program.verify()
    assert found.ok, str(found)
    undecided = pc.compile(program, pc.Mesh(pipeline=2), microbatches=3)
    assert undecided.plan.vocabulary is not None
    assert undecided.plan.vocabulary.method == "whole"


def test_a_way_that_there_is_not_is_refused() -> None:
    with pytest.raises(pc.InputError, match=r"vocabulary must be one of 'auto', .*'bogus' given"):
        compiled(Words(), vocabulary="bogus")


def test_pipedream_cannot_have_it_on_all_ranks() -> None:
    with pytest.raises(pc.InputError, match=r"cannot be spread under 'pipedream', .* synchronous"):
        compiled(Words(), schedule="pipedream")
    given: dict[str, Any] = {"microbatches": 2, "schedule": "pipedream", "vocabulary": "naive"}
    with pytest.raises(pc.InputError, match=r"cannot be spread under 'pipedream'"):
        pc.compile(Words(averaged), pc.Mesh(pipeline=2), (TOKENS, TOKENS), **given)  # no head


@cache
def program() -> pc.Program:
    return compiled(Words(), schedule="1f1b")


EDITS = {
    '"table.weight"': ('"tables.weight"', "layer 'tables.weight' cannot be spread .*no lookup or"),
    '"head": "head.weight"': ('"head": "layers.0.weight"', "layer 'layers.0.weight' cannot be"),
    '"head": "head': ('"head": 3, "_": "head', "plan.vocabulary"),
    '"method": "vocab-2"': ('"method": "vocab-9"', r"vocabulary 'vocab-9' \(known: whole, naive"),
}


@pytest.mark.parametrize("found", EDITS)
def test_a_plan_edited_into_nonsense_is_refused(found: str) -> None:
    wanted, message = EDITS[found]
    text = program().plan.to_json()
    assert text.count(found) == 1
    with pytest.raises(pc.ParcompilerError, match=message):
        plan = pc.Plan.from_json(text.replace(found, wanted))
        pc.compile(program(), pc.Mesh(pipeline=2), plan=plan)


def test_another_method_in_a_plan_is_taken() -> None:
    text = program().plan.to_json().replace('"vocab-2"', '"vocab-1"')
    plan = pc.Plan.from_json(text)
    again = pc.compile(program(), pc.Mesh(pipeline=2), plan=plan)
    assert "T mb 0" in str(again.instructions(0))
    assert again.instructions(0) != program().instructions(0)


def test_one_pipeline_rank_has_nobody_to_share_with_and_the_plan_says_so() -> None:
    program = pc.compile(*zoo_case("gpt"), vocabulary="vocab-2", microbatches=2)
    choice = program.plan.vocabulary
    assert choice is not None
    assert not choice.spread
    assert "one pipeline rank" in choice.kept[0]
    assert "one pipeline rank" in program.report().to_text(200)
    again = pc.compile(program, pc.Mesh(), plan=program.plan, vocabulary="vocab-2")
    assert again.plan == program.plan


def test_blocks_that_another_way_with_the_vocabulary_would_have_are_named_with_it() -> None:
    model, _, inputs = zoo_case("gpt")
    program = pc.compile(model, pc.Mesh(pipeline=2), inputs, vocabulary="vocab-2")
    text = program.plan.to_json().replace('"method": "vocab-2"', '"method": "whole"')
    with pytest.raises(pc.PlanError, match=r"lacks block .* \(blocks with vocabulary 'whole': "):
        pc.compile(program, pc.Mesh(pipeline=2), plan=pc.Plan.from_json(text))


def zoo_case(name: str) -> tuple[nn.Module, pc.Mesh, dict[str, Any]]:
    """A model for one rank."""
    model, inputs = zoo.build(name)
    return model, pc.Mesh(), inputs
