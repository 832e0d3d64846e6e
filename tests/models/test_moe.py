"""The mixture of experts computes what its papers say, token by token."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parcompiler.models import moe
from parcompiler.models.moe.model import Layer, Mixture, Router

CONFIG = replace(moe.PRESETS["tiny"], hidden=16, ffn=24, experts=5, top_k=2)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def mixture(config: moe.Config) -> Mixture:
    """One with parameters that are not small."""
    made = Mixture(config).double()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter)
    return made


def one_by_one(layer: Mixture, x: Tensor, slots: int) -> Tensor:
    """The definition: each token in its turn, at the experts that have places left."""
    y = torch.zeros_like(x)
    experts = layer.experts
    for b, sequence in enumerate(x):
        taken = [0] * layer.router.config.experts
        for s, token in enumerate(sequence):
            scores = F.softmax(layer.router.scores(token), dim=-1)
            best = scores.topk(layer.router.config.top_k)
            for score, e in zip(best.values / best.values.sum(), best.indices, strict=True):
                taken[e] += 1
                if taken[e] <= slots:
                    inner = token @ experts.up[e] + experts.up_bias[e, 0, 0]
                    inner = F.gelu(inner, approximate="tanh")
                    y[b, s] += score * (inner @ experts.down[e] + experts.down_bias[e, 0, 0])
    return y


@pytest.mark.parametrize("capacity", [0.5, 1.25, 5.0])
@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_every_token_goes_through_its_experts(top_k: int, capacity: float) -> None:
    config = replace(CONFIG, top_k=top_k, capacity=capacity)
    layer, x = mixture(config), torch.randn(3, 11, 16, dtype=torch.float64)
    torch.testing.assert_close(layer(x)[0], one_by_one(layer, x, config.slots(11)))


def test_no_token_is_left_out_when_there_are_places_for_all() -> None:
    config = replace(CONFIG, capacity=100.0)
    assert config.slots(11) == 11
    places, weights, _ = Router(config)(torch.randn(3, 11, 16))
    assert torch.equal(places.sum((2, 3)), torch.full((3, 11), 2.0))
    torch.testing.assert_close(weights.sum((2, 3)), torch.ones(3, 11))


def test_no_place_is_given_twice() -> None:
    places, _, _ = Router(replace(CONFIG, capacity=0.5))(torch.randn(3, 11, 16))
    assert places.sum(1).max() == 1.0


def test_even_routing_costs_one_and_uneven_more() -> None:
    router = Router(replace(CONFIG, top_k=1))
    torch.nn.init.zeros_(router.scores.weight)
    _, _, even = router(torch.randn(2, 11, 16))
    assert even.item() == pytest.approx(1.0)
    with torch.no_grad():
        router.scores.weight[0] = 100.0
    _, _, uneven = router(torch.ones(2, 11, 16))
    assert uneven.item() == pytest.approx(5.0)


def test_the_loss_counts_balance_in_training_only() -> None:
    tokens = torch.randint(256, (2, 32))
    model = moe.MoE(replace(moe.PRESETS["tiny"], balance=0.5))
    trained = model(tokens, tokens)
    plain = model.eval()(tokens, tokens)
    assert 0.4 < (trained - plain).item() < 0.8


def test_one_layer_in_two_is_sparse() -> None:
    model = moe.MoE(replace(moe.PRESETS["tiny"], layers=4, every=2))
    assert [isinstance(layer.get_submodule("ffn"), Mixture) for layer in model.layers] == [
        False,
        True,
    ] * 2


def cast_to_layer(module: nn.Module) -> Layer:
    assert isinstance(module, Layer)
    return module


def test_a_small_one_learns_its_texts_and_uses_all_experts() -> None:
    config = replace(moe.PRESETS["tiny"], hidden=32, vocabulary=32, sequence=16)
    model = moe.MoE(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    half = torch.randint(32, (64, 8))
    tokens = torch.cat([half, half], dim=1)
    losses = []
    for _ in range(150):
        optimizer.zero_grad()
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 3.4  # log 32, and a little for balance
    assert losses[-1] < 0.5
    x = model.embedding(tokens) + model.positions(torch.arange(16))
    for layer in map(cast_to_layer, model.layers):
        assert isinstance(layer.ffn, Mixture)
        router = layer.ffn.router
        seen = layer.ffn_norm(x + layer.attention(layer.attention_norm(x)))
        places, _, _ = router(seen)
        assert (places.sum((0, 1, 3)) > 0.1 * places.sum() / config.experts).all()
        x, _ = layer(x, x.new_zeros(()))
