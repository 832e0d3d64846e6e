"""Calls of the operators that regroup, take apart, put together and index tensors."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from parcompiler.spmd.simulate import example
from tests.spmd.cases import Case, aten, below, real, truth

CASES: Mapping[str, list[Case]] = {
    "view": [
        lambda a, b, c, d: example(aten.view.default, real(a, b, c * d), [a, -1, c, d]),
        lambda a, b, c, d: example(aten.view.default, real(a, b, 1, c), [a * b, c]),
        lambda a, b, c, d: example(aten.view.default, real(2 * a, 6), [a, 3, 4]),
    ],
    "reshape": [
        lambda a, b, c, d: example(aten.reshape.default, real(a, b, c, d), [a, b, c * d]),
        lambda a, b, c, d: example(aten.reshape.default, real(a, b).T, [-1]),
    ],
    "_unsafe_view": [
        lambda a, b, c, d: example(aten._unsafe_view.default, real(a * b, c), [a, b, c])
    ],
    "unflatten": [
        lambda a, b, c, d: example(aten.unflatten.int, real(a, b * c, d), 1, [b, c]),
        lambda a, b, c, d: example(aten.unflatten.int, real(a, b * c), -1, [-1, c]),
    ],
    "flatten": [lambda a, b, c, d: example(aten.flatten.using_ints, real(a, b, c, d), 1, 2)],
    "squeeze": [
        lambda a, b, c, d: example(aten.squeeze.default, real(a, 1, b)),
        lambda a, b, c, d: example(aten.squeeze.dim, real(a, 1, b), 1),
    ],
    "unsqueeze": [lambda a, b, c, d: example(aten.unsqueeze.default, real(a, b), -2)],
    "permute": [lambda a, b, c, d: example(aten.permute.default, real(a, b, c), [2, -3, 1])],
    "t": [lambda a, b, c, d: example(aten.t.default, real(a, b))],
    "numpy_T": [lambda a, b, c, d: example(aten.numpy_T.default, real(a, b))],
    **{
        name: [
            partial(
                lambda name, a, b, c, d: example(
                    getattr(getattr(aten, name), "int" if name == "transpose" else "default"),
                    real(a, b, c),
                    0,
                    -1,
                ),
                name,
            )
        ]
        for name in ("transpose", "swapaxes", "swapdims")
    },
    "expand": [
        lambda a, b, c, d: example(aten.expand.default, real(b, 1), [a, b, c]),
        lambda a, b, c, d: example(aten.expand.default, real(a, 1), [-1, c]),
    ],
    "repeat": [
        lambda a, b, c, d: example(aten.repeat.default, real(a, 1), [d, 1, c]),
        lambda a, b, c, d: example(aten.repeat.default, real(a, b), [2, 1]),
    ],
    "repeat_interleave": [
        lambda a, b, c, d: example(aten.repeat_interleave.self_int, real(a, b), c, 1),
        lambda a, b, c, d: example(
            aten.repeat_interleave.self_int, real(a, b), c, 0, output_size=a * c
        ),
        lambda a, b, c, d: example(aten.repeat_interleave.self_int, real(a, 1, b), c, 1),
        lambda a, b, c, d: example(aten.repeat_interleave.self_int, real(a, b), c),
    ],
    "split": [
        lambda a, b, c, d: example(aten.split.Tensor, real(a, 2 * b, c), b, 1),
        lambda a, b, c, d: example(aten.split.Tensor, real(a, b + c), b, 1),
    ],
    "split_with_sizes": [
        lambda a, b, c, d: example(aten.split_with_sizes.default, real(a, b + c, d), [b, c], 1)
    ],
    "chunk": [lambda a, b, c, d: example(aten.chunk.default, real(a, b, 3 * c), 3, -1)],
    "unbind": [lambda a, b, c, d: example(aten.unbind.int, real(a, 3, b), 1)],
    "tensor_split": [lambda a, b, c, d: example(aten.tensor_split.sections, real(a, b, c), 2, 1)],
    "slice": [
        lambda a, b, c, d: example(aten.slice.Tensor, real(a, b + c, d), 1, b, 1 << 62),
        lambda a, b, c, d: example(aten.slice.Tensor, real(a, b + c, d), 1, 0, b),
        lambda a, b, c, d: example(aten.slice.Tensor, real(a, b), 1, 0, b),
        lambda a, b, c, d: example(aten.slice.Tensor, real(a, b), 0),
    ],
    "narrow": [lambda a, b, c, d: example(aten.narrow.default, real(a, b + c, d), 1, b, c)],
    "select": [lambda a, b, c, d: example(aten.select.int, real(a, b, c), -2, 0)],
    **{
        name: [
            partial(
                lambda name, a, b, c, d: example(
                    getattr(aten, name).default, [real(a, b, d), real(a, c, d)], 1
                ),
                name,
            )
        ]
        for name in ("cat", "concat", "concatenate")
    },
    "stack": [lambda a, b, c, d: example(aten.stack.default, [real(a, b), real(a, b)], 1)],
    "unfold": [lambda a, b, c, d: example(aten.unfold.default, real(a, 5, b), 1, 2, 1)],
    "index_select": [
        lambda a, b, c, d: example(aten.index_select.default, real(a, b, c), 1, below(b, d))
    ],
    "gather": [
        lambda a, b, c, d: example(aten.gather.default, real(a, b, c), 1, below(b, a, d, c)),
        lambda a, b, c, d: example(aten.gather.default, real(a + 1, b), 1, below(b, a, d)),
    ],
    "take_along_dim": [
        lambda a, b, c, d: example(aten.take_along_dim.default, real(a, b), below(b, a, c), 1),
        lambda a, b, c, d: example(aten.take_along_dim.default, real(a, b), below(b, 1, c), 1),
    ],
    "scatter": [
        lambda a, b, c, d: example(
            aten.scatter.src, real(a, b), 1, torch.rand(a, b).argsort(1), real(a, b)
        ),
        lambda a, b, c, d: example(aten.scatter.value, real(a, b), 1, below(b, a, 1), 2.0),
        lambda a, b, c, d: example(aten.scatter_.value, real(a, b), 1, below(b, a, 1), 0),
    ],
    "scatter_add": [
        lambda a, b, c, d: example(
            aten.scatter_add.default, real(a, b), 1, below(b, a, c), real(a, c)
        )
    ],
    "scatter_reduce": [
        lambda a, b, c, d: example(
            aten.scatter_reduce.two, real(a, b), 1, below(b, a, c), real(a, c), "amax"
        )
    ],
    "index_add": [
        lambda a, b, c, d: example(aten.index_add.default, real(a, b), 0, below(a, c), real(c, b)),
        lambda a, b, c, d: example(
            aten.index_add_.default, real(a, b), 1, below(b, c), real(a, c), alpha=2
        ),
    ],
    "index": [
        lambda a, b, c, d: example(aten.index.Tensor, real(a, b), [below(a, c)]),
        lambda a, b, c, d: example(aten.index.Tensor, real(a, b, c), [None, below(b, d, 2)]),
        lambda a, b, c, d: example(aten.index.Tensor, real(a, b, c), [below(a, d, 1), below(b, c)]),
        lambda a, b, c, d: example(
            aten.index.Tensor, real(a, b, c), [below(a, d), None, below(c, 1)]
        ),
        lambda a, b, c, d: example(aten.index.Tensor, real(a, b), [truth(a)]),
    ],
    "index_put": [
        lambda a, b, c, d: example(
            aten.index_put.default, real(a, b), [torch.randperm(a)], real(a, b)
        ),
        lambda a, b, c, d: example(
            aten.index_put.default, real(a, b), [below(a, c)], real(c, b), True
        ),
        lambda a, b, c, d: example(
            aten.index_put_.default, real(a, b), [None, below(b, c)], real(a, c), True
        ),
        lambda a, b, c, d: example(aten.index_put.default, real(a, b), [truth(a)], real()),
    ],
    "one_hot": [lambda a, b, c, d: example(aten.one_hot.default, below(c, a, b), c)],
    "bucketize": [
        lambda a, b, c, d: example(aten.bucketize.Tensor, real(a, b), real(c).sort().values)
    ],
    "searchsorted": [
        lambda a, b, c, d: example(aten.searchsorted.Tensor, real(c).sort().values, real(a, b))
    ],
    **{
        name: [partial(lambda name, a, b, c, d: example(getattr(aten, name).default, [a, b]), name)]
        for name in ("zeros", "ones")
    },
    "full": [lambda a, b, c, d: example(aten.full.default, [a, b], 2.0)],
    **{
        name: [
            partial(
                lambda name, a, b, c, d: example(getattr(aten, name).default, real(c), [a, b]), name
            )
        ]
        for name in ("new_zeros", "new_ones")
    },
    "new_full": [lambda a, b, c, d: example(aten.new_full.default, real(c), [a, b], 2.0)],
}
