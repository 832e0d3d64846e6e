"""Layers of one structure share a template; any difference that code shows makes another."""

from torch import nn

from parcompiler.capture import capture
from parcompiler.capture.blocks import cut
from tests import zoo
from tests.distributed.models import WIDTH, XY, Stack, hostile


def templates(model: nn.Module) -> list[str]:
    """Those of the layers behind the first, which alone sends no gradient back."""
    blocks = cut(capture(model, XY), 1).blocks
    return [block.template for block in blocks if block.scope][1:]


def test_equal_layers_share_a_template() -> None:
    assert len(set(templates(Stack()))) == 1


def test_a_hundred_layers_are_as_many_templates_as_four() -> None:
    model, inputs = zoo.own_gpt(layers=30)
    found = {block.template for block in cut(capture(model, inputs), 1).blocks}
    assert len(found) == len({b.template for b in cut(capture(*zoo.own_gpt()), 1).blocks})


def test_another_constant_shape_or_frozen_weight_is_another_template() -> None:
    wide = Stack()
    wide.layers[1] = nn.Sequential(nn.Linear(WIDTH, 3), nn.Linear(3, WIDTH))
    slow = Stack(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ELU(0.5)))
    slow.layers[2][1].alpha = 0.25  # type: ignore[index]
    frozen = Stack()
    frozen.layers[3].requires_grad_(False)
    for model in (wide, slow, frozen):
        assert len(set(templates(model))) == 2


def test_names_become_identifiers() -> None:
    blocks = cut(capture(hostile(), XY), 1).blocks
    assert all(block.template.isidentifier() for block in blocks)
    attributes = [binding.attribute for block in blocks for binding in block.tensors]
    assert all(name.isidentifier() for name in attributes)
