"""How products fill tiles and waves, and which products operators are."""

import pytest
import torch

from parcompiler.cost.operation import describe
from parcompiler.cost.roofline import operation_seconds
from parcompiler.cost.tiles import products_of, reached
from parcompiler.device import device

PEAK = 1e12  # FLOP/s of a multiprocessor


def test_a_wave_that_is_hardly_begun_takes_as_long_as_a_full_one() -> None:
    full = reached([(1, 128 * 100, 256, 8192)], 100, PEAK)
    begun = reached([(1, 128 * 101, 256, 8192)], 100, PEAK)
    assert begun < full
    assert full == pytest.approx(1, rel=0.02)


def test_large_products_on_an_h100_take_what_is_measured_on_several() -> None:
    reached = {}
    for size in (2048, 8192):
        x = torch.empty(size, size, dtype=torch.bfloat16, device="meta")
        found = describe(torch.ops.aten.mm.default, (x, x), {}, x)
        assert found is not None
        reached[size] = found.flops / operation_seconds(found, device("h100")) / 1e12
    assert 518 < reached[8192] < 720  # the sources of `efficiency.matmul`
    assert 0.8 < reached[2048] / reached[8192] < 1  # alone 677 and 720 TFLOP/s


def test_a_convolution_is_a_product_forward_and_two_backward() -> None:
    image = torch.empty(2, 16, 8, 8, device="meta")
    weight = torch.empty(32, 16, 3, 3, device="meta")
    result = torch.empty(2, 32, 8, 8, device="meta")
    rest = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    forward = products_of("aten::convolution", (image, weight, None, *rest), result)
    assert forward == ((1, 128, 32, 144),)
    args = (result, image, weight, None, *rest, [True, True, False])
    backward = products_of("aten::convolution_backward", args, image)
    assert backward == ((1, 128, 16, 288), (1, 32, 144, 128))
