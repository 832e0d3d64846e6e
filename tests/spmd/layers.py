"""Calls of matrix products, convolutions, normalisations, attention, tables and losses."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from parcompiler.spmd.call import NodeCall
from parcompiler.spmd.simulate import example
from tests.spmd.cases import Case, aten, below, real


def attention(shared: int, heads: int, *, causal: bool = False, mask: str = "") -> Case:
    """Attention with `heads`, of which each `shared` have the same keys."""

    def case(a: int, b: int, c: int, d: int) -> NodeCall:
        shapes = {"": None, "scores": (b, c), "heads": (a, heads, b, c), "batch": (a, 1, 1, c)}
        shape = shapes[mask]
        return example(
            aten.scaled_dot_product_attention.default,
            real(a, heads, b, d),
            real(a, heads // shared, c, d),
            real(a, heads // shared, c, 4),
            None if shape is None else torch.randn(shape, dtype=torch.float64),
            0.0,
            causal,
            enable_gqa=shared > 1,
        )

    return case


def classes(weighted: bool, reduction: int, smoothing: float = 0.0) -> Case:
    """cross_entropy_loss with a row that does not count."""

    def case(a: int, b: int, c: int, d: int) -> NodeCall:
        target = below(b, a + 1)
        target[0] = -100
        weight = real(b) if weighted else None
        logits = torch.randn(a + 1, b, dtype=torch.float64).requires_grad_()
        return example(
            aten.cross_entropy_loss.default, logits, target, weight, reduction, -100, smoothing
        )

    return case


def grouped(a: int, b: int, c: int, d: int) -> NodeCall:
    """A product of rows with the matrices of their experts."""
    import transformers.integrations.moe  # noqa: F401  (it registers the operator)

    ends = (below(a + 1, 4).sort().values).to(torch.int32)
    ends[-1] = a
    target = torch.ops.transformers.grouped_mm_fallback.default
    return example(target, real(a, b), real(4, b, c), ends)


def convolution(name: str, groups: int, transposed: bool = False) -> Case:
    """A convolution of one to three dimensions."""

    def case(a: int, b: int, c: int, d: int) -> NodeCall:
        space = int(name[-2])
        sides = [groups * b, c] if transposed else [groups * c, b]
        tail = ([1] * space, [0] * space)
        more = ([0] * space, groups) if transposed else ([1] * space, groups)
        return example(
            getattr(getattr(aten, name), "input" if transposed and space > 1 else "default"),
            real(a, groups * b, *[4] * space),
            real(*sides, *[2] * space),
            real(groups * c),
            *tail,
            *more,
        )

    return case


CASES: Mapping[str, list[Case]] = {
    "linear": [
        lambda a, b, c, d: example(aten.linear.default, real(a, b, c), real(d, c), real(d)),
        lambda a, b, c, d: example(aten.linear.default, real(a, b), real(c, b)),
    ],
    "mm": [lambda a, b, c, d: example(aten.mm.default, real(a, b), real(b, c))],
    "mv": [lambda a, b, c, d: example(aten.mv.default, real(a, b), real(b))],
    "dot": [lambda a, b, c, d: example(aten.dot.default, real(a), real(a))],
    "outer": [lambda a, b, c, d: example(aten.outer.default, real(a), real(b))],
    "bmm": [lambda a, b, c, d: example(aten.bmm.default, real(a, b, c), real(a, c, d))],
    "bilinear": [
        lambda a, b, c, d: example(
            aten.bilinear.default, real(a, b), real(a, c), real(d, b, c), real(d)
        )
    ],
    "matmul": [
        lambda a, b, c, d: example(aten.matmul.default, real(a, 1, b, c), real(d, c, b)),
        lambda a, b, c, d: example(aten.matmul.default, real(a, b), real(c, b, d)),
        lambda a, b, c, d: example(aten.matmul.default, real(a), real(a)),
        lambda a, b, c, d: example(aten.matmul.default, real(a), real(b, a, c)),
        lambda a, b, c, d: example(aten.matmul.default, real(a, b, c), real(c)),
    ],
    "addmm": [
        lambda a, b, c, d: example(aten.addmm.default, real(c), real(a, b), real(b, c)),
        lambda a, b, c, d: example(
            aten.addmm.default, real(a, 1), real(a, b), real(b, c), beta=2, alpha=3
        ),
    ],
    "addmv": [lambda a, b, c, d: example(aten.addmv.default, real(a), real(a, b), real(b))],
    "baddbmm": [
        lambda a, b, c, d: example(
            aten.baddbmm.default, real(a, 1, d), real(a, b, c), real(a, c, d), alpha=0.5
        )
    ],
    "addbmm": [
        lambda a, b, c, d: example(aten.addbmm.default, real(b, d), real(a, b, c), real(a, c, d))
    ],
    "einsum": [
        lambda a, b, c, d: example(
            aten.einsum.default, "bik,bkj->bij", [real(a, b, c), real(a, c, d)]
        ),
        lambda a, b, c, d: example(aten.einsum.default, "...k, nk", [real(a, b, c), real(d, c)]),
        lambda a, b, c, d: example(aten.einsum.default, "ii,ij->j", [real(a, a), real(a, b)]),
    ],
    "grouped_mm_fallback": [grouped],
    **{
        f"conv{space}d": [convolution(f"conv{space}d", 1), convolution(f"conv{space}d", 4)]
        for space in (1, 2, 3)
    },
    **{
        f"conv_transpose{space}d": [
            convolution(f"conv_transpose{space}d", 1, True),
            convolution(f"conv_transpose{space}d", 4, True),
        ]
        for space in (1, 2, 3)
    },
    "convolution": [
        lambda a, b, c, d: example(
            aten.convolution.default,
            *(real(a, 4 * b, 4, 4), real(4, b, 3, 3), None),
            *([1, 1], [1, 1], [1, 1], False, [0, 0], 4),
        )
    ],
    "layer_norm": [
        lambda a, b, c, d: example(aten.layer_norm.default, real(a, b, c), [c], real(c), real(c)),
        lambda a, b, c, d: example(aten.layer_norm.default, real(a, b, c), [b, c]),
    ],
    "rms_norm": [
        lambda a, b, c, d: example(aten.rms_norm.default, real(a, b, c), [c], real(c), 1e-5)
    ],
    "batch_norm": [
        partial(
            lambda trains, a, b, c, d: example(
                aten.batch_norm.default,
                *(real(a, b, 2, 3).requires_grad_(), real(b).requires_grad_(), real(b)),
                *(real(b), real(b), trains, 0.1, 1e-5, False),
            ),
            trains,
        )
        for trains in (True, False)
    ],
    "instance_norm": [
        lambda a, b, c, d: example(
            aten.instance_norm.default,
            *(real(a, b, 5), real(b), real(b), None, None, True, 0.1, 1e-5, False),
        )
    ],
    "group_norm": [
        lambda a, b, c, d: example(
            aten.group_norm.default, real(a, 4 * b, 3), 4, real(4 * b), real(4 * b)
        ),
        lambda a, b, c, d: example(aten.group_norm.default, real(a, 8, 3), 2),
    ],
    "prelu": [
        lambda a, b, c, d: example(aten.prelu.default, real(a, b, c) - 0.5, real(b)),
        lambda a, b, c, d: example(aten.prelu.default, real(a, b, c) - 0.5, real(1)),
    ],
    "scaled_dot_product_attention": [
        attention(1, 4),
        attention(1, 4, causal=True),
        attention(1, 4, mask="scores"),
        attention(1, 4, mask="batch"),
        attention(2, 8),
        attention(4, 8, mask="heads"),
        attention(8, 8, mask="scores"),
        attention(4, 12, mask="heads"),
        attention(3, 12, causal=True),
    ],
    "embedding": [
        lambda a, b, c, d: example(aten.embedding.default, real(a, b), below(a, c, d)),
        lambda a, b, c, d: example(aten.embedding.default, real(a, b), below(a, c, d), a - 1),
    ],
    "embedding_bag": [
        partial(
            lambda mode, a, b, c, d: example(
                aten.embedding_bag.padding_idx,
                *(real(a, b), below(a, 6), torch.tensor([0, 2, 3, 6]), False, mode),
                *(False, None, True, None),
            ),
            mode,
        )
        for mode in (0, 1)
    ],
    "max_pool1d": [lambda a, b, c, d: example(aten.max_pool1d.default, real(a, b, 6), [2])],
    "max_pool2d": [lambda a, b, c, d: example(aten.max_pool2d.default, real(a, b, 6, 4), [2, 2])],
    "max_pool2d_with_indices": [
        lambda a, b, c, d: example(aten.max_pool2d_with_indices.default, real(a, b, 6, 4), [2, 2])
    ],
    "avg_pool1d": [lambda a, b, c, d: example(aten.avg_pool1d.default, real(a, b, 6), [2])],
    "avg_pool2d": [lambda a, b, c, d: example(aten.avg_pool2d.default, real(a, b, 6, 4), [2, 2])],
    "adaptive_avg_pool1d": [
        lambda a, b, c, d: example(aten.adaptive_avg_pool1d.default, real(a, b, 6), [2])
    ],
    "adaptive_avg_pool2d": [
        lambda a, b, c, d: example(aten.adaptive_avg_pool2d.default, real(a, b, 6, 4), [2, 2])
    ],
    **{
        f"upsample_{kind}2d": [
            partial(
                lambda kind, a, b, c, d: example(
                    getattr(aten, f"upsample_{kind}2d").default,
                    real(a, b, 3, 4),
                    [6, 8],
                    *([] if kind == "nearest" else [False]),
                ),
                kind,
            )
        ]
        for kind in ("nearest", "bilinear", "bicubic")
    },
    **{
        name: [
            partial(
                lambda name, reduction, a, b, c, d: example(
                    getattr(aten, name).default,
                    real(a, b).requires_grad_(),
                    real(a, b),
                    **{"reduction": reduction},
                ),
                name,
                reduction,
            )
            for reduction in range(3)
        ]
        for name in "binary_cross_entropy binary_cross_entropy_with_logits mse_loss l1_loss "
        "smooth_l1_loss huber_loss kl_div".split()
    },
    "cross_entropy_loss": [
        *(classes(False, reduction) for reduction in range(3)),
        *(classes(True, reduction) for reduction in range(3)),
        classes(False, 1, smoothing=0.1),
        classes(True, 1, smoothing=0.1),
    ],
    "nll_loss_nd": [
        partial(
            lambda reduction, a, b, c, d: example(
                aten.nll_loss_nd.default, real(a, b), below(b, a), None, reduction
            ),
            reduction,
        )
        for reduction in range(3)
    ],
}
