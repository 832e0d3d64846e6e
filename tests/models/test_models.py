"""The models learn, have the published sizes, and export."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parcompiler.models import bert, dlrm, gpt, llama, moe, resnet, t5
from parcompiler.models.llama.model import rotate

BATCH = 4


@dataclass(frozen=True, slots=True)
class Case:
    """One tiny model: how to build it, its inputs without labels, and its labels."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]
    labels: Callable[[], Tensor]
    classes: int  # 1: yes or no

    def arguments(self) -> tuple[Tensor, ...]:
        return (*self.inputs(), self.labels())


def tokens(config: Any) -> Tensor:
    return torch.randint(config.vocabulary, (BATCH, config.sequence))


def text_case(module: Any, model: Callable[[Any], nn.Module], num_inputs: int = 1) -> Case:
    config = module.PRESETS["tiny"]
    return Case(
        build=lambda: model(config),
        inputs=lambda: tuple(tokens(config) for _ in range(num_inputs)),
        labels=lambda: tokens(config),
        classes=config.vocabulary,
    )


def clicks(config: dlrm.Config) -> tuple[Tensor, ...]:
    columns = [torch.randint(rows, (BATCH,)) for rows in config.tables]
    return torch.randn(BATCH, config.numbers), torch.stack(columns, dim=1)


TINY = resnet.PRESETS["tiny"]
CASES = {
    "gpt": text_case(gpt, gpt.GPT),
    "llama": text_case(llama, llama.Llama),
    "bert": text_case(bert, bert.BERT),
    "t5": text_case(t5, t5.T5, num_inputs=2),
    "moe": text_case(moe, moe.MoE),
    "dlrm": Case(
        build=lambda: dlrm.DLRM(dlrm.PRESETS["tiny"]),
        inputs=lambda: clicks(dlrm.PRESETS["tiny"]),
        labels=lambda: torch.randint(2, (BATCH,)).float(),
        classes=1,
    ),
    "resnet": Case(
        build=lambda: resnet.ResNet(TINY),
        inputs=lambda: (torch.randn(BATCH, TINY.in_channels, TINY.image_size, TINY.image_size),),
        labels=lambda: torch.randint(TINY.classes, (BATCH,)),
        classes=TINY.classes,
    ),
}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=sorted(CASES))
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


def lifted(values: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    return tuple(v.to(dtype) if v.is_floating_point() else v for v in values)


def count(model: nn.Module) -> int:
    """Number of parameters, tied ones once."""
    return sum(p.numel() for p in model.parameters())


def test_one_step_lowers_the_loss(case: Case) -> None:
    model, arguments = case.build(), case.arguments()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    before = model(*arguments)
    before.backward()
    assert all(p.grad is not None for p in model.parameters())
    optimizer.step()
    assert model(*arguments) < before


@pytest.mark.parametrize("name", ["gpt", "llama", "bert", "resnet", "moe"])
def test_the_initial_loss_is_that_of_a_guess(name: str) -> None:
    case = CASES[name]
    loss = case.build()(*case.arguments())
    assert loss.item() == pytest.approx(math.log(case.classes), rel=0.05)


def test_the_initial_loss_of_an_untied_t5_is_that_of_logits_of_variance_one() -> None:
    # Tied, T5 starts by repeating its input: the embedding's variance is 1.
    config = replace(t5.PRESETS["tiny"], tied=False)
    loss = t5.T5(config)(tokens(config), tokens(config), tokens(config))
    assert loss.item() == pytest.approx(math.log(config.vocabulary) + 0.5, rel=0.05)


def test_without_labels_a_model_returns_logits(case: Case) -> None:
    model, inputs, labels = case.build().eval(), case.inputs(), case.labels()
    logits = model(*inputs)
    if case.classes == 1:
        assert logits.shape == labels.shape
        loss = nn.functional.binary_cross_entropy(logits.sigmoid(), labels)
    else:
        assert logits.shape == (*labels.shape, case.classes)
        loss = nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())
    torch.testing.assert_close(model(*inputs, labels), loss)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_the_exported_model_gives_the_same_loss(case: Case, dtype: torch.dtype) -> None:
    model = case.build().to(dtype)
    arguments = lifted(case.arguments(), dtype)
    program = torch.export.export(copy.deepcopy(model), arguments, strict=False)
    values = [node.meta["val"] for node in program.graph.nodes if "val" in node.meta]
    if dtype == torch.float64 and case is not CASES["t5"]:
        assert not any(isinstance(v, Tensor) and v.dtype == torch.float32 for v in values)
    loss = model(*arguments)
    assert loss.dtype == dtype
    assert torch.equal(program.module()(*arguments), loss)


def test_a_model_without_values_exports(case: Case) -> None:
    with torch.device("meta"):
        model, arguments = case.build(), case.arguments()
    assert all(p.is_meta for p in model.parameters())
    program = torch.export.export(model, arguments, strict=False)
    assert program.graph_signature.user_outputs


def test_a_model_built_without_values_can_be_filled(case: Case) -> None:
    reference = case.build()
    with torch.device("meta"):
        model: Any = case.build()
    model.to_empty(device="cpu")
    model.reset_parameters()
    assert count(model) == count(reference)
    buffers = dict(reference.named_buffers())
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[name]), name
    assert torch.isfinite(model(*case.arguments()))


@pytest.mark.parametrize(
    ("build", "config", "weight"),
    [
        (gpt.GPT, gpt.PRESETS["tiny"], "embedding.weight"),
        (llama.Llama, llama.PRESETS["tiny"], "embedding.weight"),
        (bert.BERT, bert.PRESETS["tiny"], "embeddings.tokens.weight"),
        (t5.T5, t5.PRESETS["tiny"], "embedding.weight"),
        (moe.MoE, moe.PRESETS["tiny"], "embedding.weight"),
    ],
    ids=["gpt", "llama", "bert", "t5", "moe"],
)
def test_tied_models_share_the_tensor(build: Callable[..., Any], config: Any, weight: str) -> None:
    tied = build(replace(config, tied=True)).double()
    untied = build(replace(config, tied=False))
    assert tied.head.weight is tied.get_parameter(weight)
    assert untied.head.weight is not untied.get_parameter(weight)
    assert count(untied) - count(tied) == config.vocabulary * config.hidden


PUBLISHED = {
    # GPT-2 with its sequence of 1024 and its tied head.
    "gpt2": (gpt.GPT, replace(gpt.PRESETS["125m"], sequence=1024), 124_439_808),
    "gpt2-medium": (gpt.GPT, replace(gpt.PRESETS["350m"], sequence=1024), 354_823_168),
    "llama-2-7b": (llama.Llama, llama.PRESETS["7b"], 6_738_415_616),
    "llama-2-13b": (llama.Llama, llama.PRESETS["13b"], 13_015_864_320),
    "llama-2-70b": (llama.Llama, llama.PRESETS["70b"], 68_976_648_192),
    "llama-3-8b": (llama.Llama, llama.PRESETS["3-8b"], 8_030_261_248),
    "llama-3-70b": (llama.Llama, llama.PRESETS["3-70b"], 70_553_706_496),
    "llama-3.1-405b": (llama.Llama, llama.PRESETS["3.1-405b"], 405_853_388_800),
    "bert-base-uncased": (bert.BERT, bert.PRESETS["base"], 109_514_298),
    "bert-large-uncased": (bert.BERT, bert.PRESETS["large"], 335_174_458),
    "t5-small": (t5.T5, t5.PRESETS["small"], 60_506_624),
    "t5-base": (t5.T5, t5.PRESETS["base"], 222_903_552),
    "t5-large": (t5.T5, t5.PRESETS["large"], 737_668_096),
    "t5-3b": (t5.T5, t5.PRESETS["3b"], 2_851_598_336),
    "t5-11b": (t5.T5, t5.PRESETS["11b"], 11_307_321_344),
    "resnet18": (resnet.ResNet, resnet.PRESETS["resnet18"], 11_689_512),
    "resnet34": (resnet.ResNet, resnet.PRESETS["resnet34"], 21_797_672),
    "resnet50": (resnet.ResNet, resnet.PRESETS["resnet50"], 25_557_032),
    "resnet101": (resnet.ResNet, resnet.PRESETS["resnet101"], 44_549_160),
    "resnet152": (resnet.ResNet, resnet.PRESETS["resnet152"], 60_192_808),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_the_published_number_of_parameters(name: str) -> None:
    build, config, published = PUBLISHED[name]
    with torch.device("meta"):
        assert count(build(config)) == published


@pytest.mark.parametrize("name", [name for name in gpt.PRESETS if name != "tiny"])
def test_a_gpt_preset_has_about_the_parameters_of_its_name(name: str) -> None:
    published = float(name[:-1]) * {"m": 1e6, "b": 1e9}[name[-1]]
    with torch.device("meta"):
        assert count(gpt.GPT(gpt.PRESETS[name])) == pytest.approx(published, rel=0.03)


@pytest.mark.parametrize("name", [name for name in moe.PRESETS if name != "tiny"])
def test_a_moe_preset_has_about_the_parameters_of_its_name(name: str) -> None:
    published = float(name[:-1]) * {"b": 1e9, "t": 1e12}[name[-1]]
    with torch.device("meta"):
        assert count(moe.MoE(moe.PRESETS[name])) == pytest.approx(published, rel=0.03)


@pytest.mark.parametrize(("name", "published"), [("criteo", 540e6), ("mlperf", 24e9)])
def test_a_dlrm_preset_has_about_the_published_parameters(name: str, published: float) -> None:
    with torch.device("meta"):
        assert count(dlrm.DLRM(dlrm.PRESETS[name])) == pytest.approx(published, rel=0.01)


def test_bert_ignores_the_labels_that_are_not_masked() -> None:
    config = bert.PRESETS["tiny"]
    model, inputs, labels = bert.BERT(config), tokens(config), tokens(config)
    masked = torch.rand(labels.shape) < 0.15
    loss = model(inputs, labels.masked_fill(~masked, -100))
    expected = nn.functional.cross_entropy(model(inputs)[masked], labels[masked])
    torch.testing.assert_close(loss, expected)


def test_bert_does_not_look_at_padding() -> None:
    config = bert.PRESETS["tiny"]
    model, inputs = bert.BERT(config), tokens(config)
    mask = (torch.arange(config.sequence) < 20).expand(BATCH, -1)
    other = torch.where(mask, inputs, 0)
    one, two = model(inputs, mask=mask), model(other, mask=mask)
    torch.testing.assert_close(one[:, :20], two[:, :20])
    assert not torch.allclose(model(inputs)[:, :20], model(other)[:, :20])


def test_bert_tells_sentences_apart_by_their_types() -> None:
    config = bert.PRESETS["tiny"]
    model, inputs = bert.BERT(config), tokens(config)
    default = model(inputs)
    assert torch.equal(default, model(inputs, types=torch.zeros_like(inputs)))
    assert not torch.equal(default, model(inputs, types=torch.ones_like(inputs)))


@pytest.mark.parametrize("name", ["gpt", "llama", "t5", "moe"])
def test_a_decoder_does_not_see_the_future(name: str) -> None:
    model, inputs = CASES[name].build(), CASES[name].inputs()
    changed = inputs[-1].clone()
    changed[:, 10] = (changed[:, 10] + 1) % CASES[name].classes
    one, two = model(*inputs), model(*inputs[:-1], changed)
    torch.testing.assert_close(one[:, :10], two[:, :10])
    assert not torch.allclose(one[:, 10:], two[:, 10:])


def test_llama_scores_depend_on_the_distance_alone() -> None:
    config = llama.PRESETS["tiny"]
    model = llama.Llama(config)
    q, k = torch.randn(2, config.head_size)
    q, k = (rotate(x.expand(config.sequence, -1), model.cos, model.sin) for x in (q, k))
    scores = q @ k.T
    torch.testing.assert_close(scores[1:, 1:], scores[:-1, :-1])


def test_dropout_acts_in_training_only() -> None:
    models = {
        "gpt": gpt.GPT(replace(gpt.PRESETS["tiny"], dropout=0.5)),
        "bert": bert.BERT(replace(bert.PRESETS["tiny"], dropout=0.5)),
        "t5": t5.T5(replace(t5.PRESETS["tiny"], dropout=0.5)),
        "moe": moe.MoE(replace(moe.PRESETS["tiny"], dropout=0.5)),
    }
    for name, model in models.items():
        inputs = CASES[name].inputs()
        assert not torch.equal(model(*inputs), model(*inputs))
        model.eval()
        assert torch.equal(model(*inputs), model(*inputs))


def test_an_impossible_size_is_refused() -> None:
    for module in (gpt, llama, bert, t5, moe):
        with pytest.raises(ValueError, match=r"hidden \(100\) must be"):
            module.Config(hidden=100, heads=8)
    with pytest.raises(ValueError, match=r"kv_heads \(3\)"):
        llama.Config(heads=4, kv_heads=3)
    with pytest.raises(ValueError, match="pair up"):
        resnet.Config(depths=(1,))
    with pytest.raises(ValueError, match=r"top_k \(3\)"):
        moe.Config(experts=2, top_k=3)
    with pytest.raises(ValueError, match="every size"):
        dlrm.Config(tables=(10, 0))
