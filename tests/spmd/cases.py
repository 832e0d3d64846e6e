"""For every operator with a written rule, calls of it on random tensors of random sizes.

A case is a function from four sizes to the operator and its arguments; tensors that require
gradients are marked, and where none is, all floating ones get them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import fx

from parcompiler.capture.evaluation import BY_MODE
from parcompiler.spmd.call import NodeCall, read
from parcompiler.spmd.elementwise import NONLINEAR
from parcompiler.spmd.rules import is_unknown, strategies, written_rule
from parcompiler.spmd.simulate import example

aten = torch.ops.aten
Case = Callable[[int, int, int, int], NodeCall]


def real(*shape: int) -> torch.Tensor:
    """Between 0.1 and 0.9: inside the domain of every function."""
    return torch.rand(shape, dtype=torch.float64) * 0.8 + 0.1


def source(node: fx.Node, n: int) -> str:
    """Where the strategies of a node come from; "replicated" when there are no others."""
    call = read(node)
    if is_unknown(call) and not all(s.is_replicated for s in strategies(node, n)):
        return "discovered"
    return "replicated" if is_unknown(call) or written_rule(call) is None else "written"


def below(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(high, shape)


def truth(*shape: int) -> torch.Tensor:
    return torch.rand(shape) < 0.5


_BITS = {name for name in NONLINEAR if name.startswith(("bitwise", "__"))}
_APART = {"clamp", "clip", "fill", "floor_divide"}
_RANDOM = {"bernoulli", "rand_like", "randn_like", "randint_like", "empty_like", "alpha_dropout"}


def pointwise(name: str) -> list[Case]:
    """Calls of an elementwise operator by its schema: of equal tensors, and with stretched ones."""
    overload = _overload(name)
    needed = [a for a in overload._schema.arguments if not a.has_default_value()]

    def call(a: int, b: int, c: int, d: int, *, stretched: bool) -> NodeCall:
        shapes = itertools.chain([(a, b, c)], itertools.repeat((b, 1) if stretched else (a, b, c)))
        make = (lambda *s: below(8, *s)) if name in _BITS else real
        return example(
            overload,
            *(make(*next(shapes)) if str(x.type) == "Tensor" else 1 for x in needed),
        )

    return [
        lambda *sizes: call(*sizes, stretched=False),
        lambda *sizes: call(*sizes, stretched=True),
    ]


def _overload(name: str) -> torch._ops.OpOverload:
    packet = getattr(aten, name)
    wanted = ("Tensor", "Tensor_Tensor", "self", "default", "Scalar")
    found: torch._ops.OpOverload = getattr(
        packet, next(overload for overload in wanted if overload in packet.overloads())
    )
    return found


CASES: Mapping[str, list[Case]] = {
    **{name: pointwise(name) for name in sorted(NONLINEAR - _RANDOM - _APART)},
    **{
        name: [
            partial(
                lambda name, a, b, c, d: example(_overload(name), real(a, b), real(b), real(1)),
                name,
            )
        ]
        for name in ("clamp", "clip")
    },
    "fill": [lambda a, b, c, d: example(aten.fill_.Scalar, real(a, b), 2.0)],
    "floor_divide": [
        lambda a, b, c, d: example(aten.floor_divide.default, below(9, a, b), below(9, b) + 1)
    ],
    **{
        name: [partial(lambda name, a, b, c, d: example(_overload(name), real(a, b, c)), name)]
        for name in "alias clone contiguous conj detach lift_fresh_copy lift_fresh neg "
        "negative positive resolve_conj resolve_neg real ravel mT adjoint "
        "_neg_view conj_physical".split()
    },
    **{
        name: [
            partial(
                lambda name, a, b, c, d: example(
                    _overload(name), torch.complex(real(a, b), real(a, b))
                ),
                name,
            )
        ]
        for name in ("_conj", "imag", "matrix_H")
    },
    "by_mode": [lambda a, b, c, d: example(BY_MODE, real(a, b), real(a, b))],
    "complex": [lambda a, b, c, d: example(aten.complex.default, real(a, b), real(a, b))],
    "copy": [lambda a, b, c, d: example(aten.copy_.default, real(a, b), real(1, b))],
    "dropout": [
        lambda a, b, c, d: example(aten.dropout.default, real(a, b), 0.0, True),
        lambda a, b, c, d: example(aten.dropout.default, real(a, b), 0.5, True),
    ],
    "addcmul": [
        lambda a, b, c, d: example(aten.addcmul.default, real(a, b), real(b), real(a, 1), value=2)
    ],
    "addcdiv": [lambda a, b, c, d: example(aten.addcdiv.default, real(a, b), real(b), real(a, 1))],
    "lerp": [
        lambda a, b, c, d: example(aten.lerp.Tensor, real(a, b), real(b), real(a, 1)),
        lambda a, b, c, d: example(aten.lerp.Scalar, real(a, b), real(b), 0.3),
    ],
    "expand_as": [lambda a, b, c, d: example(aten.expand_as.default, real(b, 1), real(a, b, c))],
    **{
        name: [
            partial(
                lambda name, a, b, c, d: example(_overload(name), real(a, b, c), real(b, 1)), name
            ),
            partial(
                lambda name, a, b, c, d: example(getattr(aten, name).Tensor, real(a, b), 2.0), name
            ),
        ]
        for name in "add sub subtract rsub mul multiply div divide true_divide".split()
        if name != "rsub"
    },
    "rsub": [lambda a, b, c, d: example(aten.rsub.Scalar, real(a, b), 2.0)],
    "where": [
        lambda a, b, c, d: example(aten.where.self, truth(b, c), real(a, b, 1), real(c)),
        lambda a, b, c, d: example(aten.where.ScalarOther, truth(b, c), real(a, b, 1), 0.0),
        lambda a, b, c, d: example(aten.where.ScalarOther, truth(b, c), real(a, b, 1), -1.0),
        lambda a, b, c, d: example(aten.where.ScalarSelf, truth(b, c), 3.0, real(a, b, 1)),
        lambda a, b, c, d: example(aten.where.default, truth(b, c)),
    ],
    "masked_fill": [
        lambda a, b, c, d: example(aten.masked_fill.Scalar, real(a, b, c), truth(b, 1), 0),
        lambda a, b, c, d: example(aten.masked_fill_.Scalar, real(a, b, c), truth(b, 1), -5.0),
        lambda a, b, c, d: example(aten.masked_fill.Tensor, real(a, b, c), truth(c), real()),
    ],
    "to": [
        lambda a, b, c, d: example(aten.to.dtype, real(a, b), torch.float32),
        lambda a, b, c, d: example(aten.to.dtype, real(a, b), torch.int64),
        lambda a, b, c, d: example(aten.to.other, real(a, b), real(c)),
    ],
    "_to_copy": [lambda a, b, c, d: example(aten._to_copy.default, real(a, b), dtype=torch.int32)],
    "type_as": [lambda a, b, c, d: example(aten.type_as.default, real(a, b), real(c))],
    **{
        name: [
            partial(
                lambda name, a, b, c, d: example(getattr(aten, name).int, real(a, b, c), -2), name
            )
        ]
        for name in ("softmax", "log_softmax")
    },
    **{
        name: [
            partial(
                lambda name, a, b, c, d: example(
                    getattr(aten, name).default, real(a, b, c), 1, False
                ),
                name,
            )
        ]
        for name in ("_softmax", "_log_softmax")
    },
    **{
        name: [partial(lambda name, a, b, c, d: example(_overload(name), real(a, b, c), 1), name)]
        for name in ("cumprod", "cummax", "cummin", "logcumsumexp", "argsort")
    },
    "sort": [lambda a, b, c, d: example(aten.sort.default, real(a, b, c), 1)],
    "topk": [lambda a, b, c, d: example(aten.topk.default, real(a, b, c), 1)],
    "cumsum": [
        lambda a, b, c, d: example(aten.cumsum.default, real(a, b, c), 1),
        lambda a, b, c, d: example(aten.cumsum.default, real(a, b), 0, dtype=torch.int64),
    ],
    "flip": [lambda a, b, c, d: example(aten.flip.default, real(a, b, c), [0, -1])],
    "roll": [
        lambda a, b, c, d: example(aten.roll.default, real(a, b, c), [1], [1]),
        lambda a, b, c, d: example(aten.roll.default, real(a, b, c), [1]),
    ],
    "sum": [
        lambda a, b, c, d: example(aten.sum.dim_IntList, real(a, b, c), [1], True),
        lambda a, b, c, d: example(aten.sum.dim_IntList, real(a, b, c), [0, -1]),
        lambda a, b, c, d: example(aten.sum.default, real(a, b)),
        lambda a, b, c, d: example(aten.sum.default, truth(a, b)),
    ],
    "mean": [
        lambda a, b, c, d: example(aten.mean.dim, real(a, b, c), [1, 2], True),
        lambda a, b, c, d: example(aten.mean.default, real(a, b)),
    ],
    "count_nonzero": [lambda a, b, c, d: example(aten.count_nonzero.dim_IntList, truth(a, b), [1])],
    **{
        name: [
            partial(
                lambda name, a, b, c, d: example(getattr(aten, name).default, real(a, b, c), [1]),
                name,
            )
        ]
        for name in ("amax", "amin", "logsumexp")
    },
    **{
        name: [
            partial(
                lambda name, a, b, c, d: example(getattr(aten, name).default, real(a, b, c), 1),
                name,
            ),
            partial(
                lambda name, a, b, c, d: example(getattr(aten, name).default, real(a, b)), name
            ),
        ]
        for name in ("argmax", "argmin")
    },
    **{
        name: [
            partial(
                lambda name, a, b, c, d: example(getattr(aten, name).dim, real(a, b, c), 1), name
            ),
            partial(
                lambda name, a, b, c, d: example(getattr(aten, name).default, real(a, b)), name
            ),
        ]
        for name in ("max", "min", "median")
    },
    **{
        name: [
            partial(
                lambda name, a, b, c, d: example(getattr(aten, name).dim, truth(a, b, c), 1), name
            )
        ]
        for name in ("all", "any")
    },
    "prod": [lambda a, b, c, d: example(aten.prod.dim_int, real(a, b, c), 1)],
    **{
        name: [
            partial(
                lambda name, a, b, c, d: example(
                    getattr(aten, name).correction, real(a, b, c), [1], correction=0
                ),
                name,
            )
        ]
        for name in ("var", "std", "var_mean", "std_mean")
    },
    "norm": [lambda a, b, c, d: example(aten.norm.ScalarOpt_dim, real(a, b, c), 2, [1])],
    "linalg_vector_norm": [
        lambda a, b, c, d: example(aten.linalg_vector_norm.default, real(a, b, c), 2, [1])
    ],
    "diff": [
        lambda a, b, c, d: example(aten.diff.default, real(a, 4, c), 1, 1),
        lambda a, b, c, d: example(aten.diff.default, real(a, 4, c), 1, 1, real(a, 1, c)),
    ],
    "pad": [
        lambda a, b, c, d: example(aten.pad.default, real(a, b, c), [1, 0]),
        lambda a, b, c, d: example(aten.pad.default, real(a, b, c), [0, 0, 2, 1], "constant", 3.0),
        lambda a, b, c, d: example(aten.pad.default, real(a, b, 6), [2, 1], "reflect"),
    ],
    "constant_pad_nd": [
        lambda a, b, c, d: example(aten.constant_pad_nd.default, real(a, b, c), [1, 2])
    ],
    "tril": [lambda a, b, c, d: example(aten.tril.default, real(a, b, c))],
    "triu": [lambda a, b, c, d: example(aten.triu.default, real(a, b, c), 1)],
    "histc": [
        lambda a, b, c, d: example(aten.histc.default, real(a), 4, 0, 1),
        lambda a, b, c, d: example(aten.histc.default, real(a), 4),
    ],
    "glu": [lambda a, b, c, d: example(aten.glu.default, real(a, b, 4), -1)],
    "_weight_norm": [
        lambda a, b, c, d: example(aten._weight_norm.default, real(a, b, c), real(1, 1, c), 2)
    ],
}
