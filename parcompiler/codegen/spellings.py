"""Idiomatic Python for the operators of ATen: a table of spellings, and how one is filled in.

>>> [spelling.text for spelling in spellings("add.Tensor")]
['self + other', 'torch.add(self, other, alpha=alpha)']
"""

import ast
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property

from parcompiler.codegen.calls import BoundCall
from parcompiler.codegen.literals import literal

MODULES = frozenset({"torch", "F", "runtime"})
SWITCHES = frozenset({"cudnn_enable", "cudnn_enabled"})  # of the machine that captured

# A spelling is Python in the argument names of the operator's schema, followed by the operators
# that it fits; `{op}` is the name of the operator, and no overload means `.default`.
#
#   * An argument with its default value is left out; those after it are passed by keyword.
#   * `*size` spreads a list of sizes; k equal sizes for an `int[k]` are written as one.
#   * An operator takes the first spelling that names all its arguments that are not defaults.
#     Where there is none, its full name under `torch.ops` is used.
SPELLINGS = {
    # Operators of the language
    "self + other": "add.Tensor add.Scalar",
    "self - other": "sub.Tensor sub.Scalar",
    "other - self": "rsub.Scalar",
    "self * other": "mul.Tensor mul.Scalar",
    "self / other": "div.Tensor div.Scalar",
    "self // other": "floor_divide floor_divide.Scalar",
    "self % other": "remainder.Tensor remainder.Scalar remainder.Scalar_Tensor",
    "self ** exponent": "pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar",
    "self @ other": "matmul",
    "self == other": "eq.Tensor eq.Scalar",
    "self != other": "ne.Tensor ne.Scalar",
    "self < other": "lt.Tensor lt.Scalar",
    "self <= other": "le.Tensor le.Scalar",
    "self > other": "gt.Tensor gt.Scalar",
    "self >= other": "ge.Tensor ge.Scalar",
    "self & other": "__and__.Tensor __and__.Scalar bitwise_and.Tensor bitwise_and.Scalar",
    "self | other": "__or__.Tensor __or__.Scalar bitwise_or.Tensor bitwise_or.Scalar",
    "self ^ other": "__xor__.Tensor __xor__.Scalar bitwise_xor.Tensor bitwise_xor.Scalar",
    "-self": "neg",
    "torch.conj(self)": "_conj",
    "~self": "bitwise_not",
    "self[...]": "alias",
    # Element by element
    "torch.{op}(self)": "abs acos asin atan ceil cos cosh erf erfc exp exp2 expm1 floor frac isinf"
    " isnan log log10 log1p log2 logical_not reciprocal round rsqrt sigmoid sign sin sinh sqrt"
    " square tan tanh trunc nonzero bernoulli view_as_complex view_as_real conj_physical"
    " resolve_conj resolve_neg",
    "torch.{op}(self, other)": "atan2 logical_and logical_or logical_xor max.other maximum"
    " min.other minimum multiply.Tensor",
    "torch.{op}(self, other, alpha=alpha)": "add.Tensor add.Scalar sub.Tensor sub.Scalar"
    " rsub.Scalar rsub.Tensor",
    "torch.{op}(self, other, rounding_mode=rounding_mode)": "div.Tensor_mode div.Scalar_mode",
    "torch.{op}(self, tensor1, tensor2, value=value)": "addcdiv addcmul",
    "torch.{op}(self, end, weight)": "lerp.Scalar lerp.Tensor",
    "torch.{op}(self, nan=nan, posinf=posinf, neginf=neginf)": "nan_to_num",
    "torch.{op}(abs, angle)": "polar",
    "torch.{op}(real, imag)": "complex",
    "torch.{op}(condition, self, other)": "where.self where.ScalarOther where.ScalarSelf",
    "self.{op}(min, max)": "clamp clamp.Tensor clamp_ clamp_.Tensor",
    "self.{op}(min)": "clamp_min clamp_min.Tensor clamp_min_",
    "self.{op}(max)": "clamp_max clamp_max.Tensor clamp_max_",
    "self.{op}(mask, value)": "masked_fill.Scalar masked_fill.Tensor masked_fill_.Scalar"
    " masked_fill_.Tensor",
    # In place, and methods without arguments
    "self.{op}()": "abs_ ceil_ cos_ erf_ exp_ floor_ log_ logical_not_ neg_ reciprocal_ relu_"
    " round_ rsqrt_ sigmoid_ sin_ sqrt_ square_ tanh_ zero_ detach_"
    " all any max min item detach squeeze t",
    "self.{op}(other, alpha=alpha)": "add_.Tensor add_.Scalar sub_.Tensor sub_.Scalar",
    "self.{op}(other)": "div_.Tensor div_.Scalar mul_.Tensor mul_.Scalar expand_as reshape_as"
    " type_as view_as bitwise_and_.Tensor bitwise_or_.Tensor bitwise_xor_.Tensor"
    " floor_divide_.Tensor floor_divide_.Scalar remainder_.Tensor remainder_.Scalar"
    " logical_and_ logical_or_",
    "self.{op}(exponent)": "pow_.Scalar pow_.Tensor",
    "self.{op}(value)": "fill_.Scalar fill_.Tensor",
    "self.{op}(src, non_blocking=non_blocking)": "copy_",
    "self.{op}(p)": "bernoulli_.float",
    "self.{op}(mean, std)": "normal_",
    "self.{op}(from_, to)": "uniform_",
    "self.{op}(lambd)": "exponential_",
    # Shape, layout, dtype
    "self.{op}(*size)": "expand view",
    "self.{op}(*shape)": "reshape",
    "self.{op}(*dims)": "flip permute tile",
    "self.{op}(*repeats)": "repeat",
    "self.{op}(dim)": "unsqueeze unsqueeze_ squeeze.dim squeeze.dims unbind.int",
    "self.{op}(dim0, dim1)": "transpose.int",
    "self.{op}(axis0, axis1)": "swapaxes",
    "self.{op}(size)": "broadcast_to",
    "self.{op}(source, destination)": "movedim.int movedim.intlist",
    "self.{op}(start_dim, end_dim)": "flatten.using_ints",
    "self.{op}(dim, sizes)": "unflatten.int",
    "self.{op}(dim, start, length)": "narrow",
    "self.{op}(offset, dim1=dim1, dim2=dim2)": "diagonal",
    "self.{op}(dimension, size, step)": "unfold",
    "self.T": "numpy_T",
    "self.{op}": "imag mT real",
    "self.shape[dim]": "sym_size.int",
    "self.contiguous(memory_format=memory_format)": "contiguous",
    "self.clone(memory_format=memory_format)": "clone",
    "self.clone()": "lift_fresh_copy",
    "self.to(dtype, non_blocking=non_blocking, copy=copy, memory_format=memory_format)": "to.dtype"
    " to.dtype_layout",
    "self.to(device, dtype, non_blocking=non_blocking, copy=copy,"
    " memory_format=memory_format)": "to.device to.dtype_layout",
    "self.to(other, non_blocking=non_blocking, copy=copy)": "to.other",
    "torch.{op}(tensors, dim=dim)": "cat concat stack",
    "torch.{op}(*tensors)": "broadcast_tensors",
    "torch.{op}(*tensors, indexing=indexing)": "meshgrid.indexing",
    "self.split(split_size, dim=dim)": "split.Tensor",
    "self.split(split_sizes, dim=dim)": "split_with_sizes",
    "self.chunk(chunks, dim=dim)": "chunk",
    "torch.{op}(self, shifts, dims)": "roll",
    "torch.{op}(self, diagonal=diagonal)": "tril triu",
    "self.{op}(repeats, dim=dim)": "repeat_interleave.self_int",
    "F.{op}(self, pad, mode=mode, value=value)": "pad",
    "F.{op}(self, upscale_factor)": "pixel_shuffle",
    # Looking up and storing
    "torch.{op}(self, dim, index)": "gather index_select",
    "self.{op}(dim, index, src)": "scatter.src scatter_.src scatter_add scatter_add_",
    "self.{op}(dim, index, value)": "scatter.value scatter_.value index_fill.int_Scalar",
    "self.{op}(dim, index, source)": "index_copy index_copy_",
    "self.{op}(dim, index, src, reduce, include_self=include_self)": "scatter_reduce.two"
    " scatter_reduce_.two",
    "self.{op}(mask, source)": "masked_scatter masked_scatter_",
    "torch.{op}(self, mask)": "masked_select",
    "torch.{op}(self, boundaries, out_int32=out_int32, right=right)": "bucketize.Tensor",
    "self.{op}(dim, index, source, alpha=alpha)": "index_add index_add_",
    "self.{op}(indices, values, accumulate=accumulate)": "index_put index_put_",
    "F.{op}(self, num_classes)": "one_hot",
    "F.{op}(indices, weight, padding_idx, scale_grad_by_freq=scale_grad_by_freq,"
    " sparse=sparse)": "embedding",
    "torch.{op}(weight, indices, offsets, scale_grad_by_freq, mode, sparse, per_sample_weights,"
    " include_last_offset, padding_idx)": "embedding_bag.padding_idx",
    # Reductions, order
    "self.{op}(dtype=dtype)": "mean sum prod",
    "self.{op}(dim, keepdim=keepdim, dtype=dtype)": "mean.dim sum.dim_IntList prod.dim_int",
    "self.{op}(dim=dim, keepdim=keepdim)": "amax amin argmax argmin all.dim any.dim max.dim"
    " min.dim logsumexp",
    "self.{op}(dim, correction=correction, keepdim=keepdim)": "var.correction std.correction",
    "self.{op}(dim, unbiased=unbiased, keepdim=keepdim)": "var.dim std.dim",
    "torch.{op}(self, dim=dim, dtype=dtype)": "cumsum cumprod",
    "torch.{op}(self, k, dim=dim, largest=largest, sorted=sorted)": "topk",
    "torch.{op}(self, n, dim=dim, prepend=prepend, append=append)": "diff",
    "torch.{op}(self, dim=dim, descending=descending)": "sort argsort",
    "torch.{op}(self, bins=bins, min=min, max=max)": "histc",
    "torch.linalg.vector_norm(self, ord, dim=dim, keepdim=keepdim,"
    " dtype=dtype)": "linalg_vector_norm",
    # Products
    "torch.{op}(self, mat2)": "bmm mm",
    "torch.{op}(self, vec)": "mv",
    "torch.{op}(self, vec2)": "outer",
    "torch.{op}(self, tensor)": "dot",
    "torch.{op}(self, mat1, mat2, beta=beta, alpha=alpha)": "addmm",
    "torch.{op}(self, batch1, batch2, beta=beta, alpha=alpha)": "baddbmm addbmm",
    "torch.{op}(equation, *tensors)": "einsum",
    "torch.{op}(v, g, dim)": "_weight_norm",
    "torch.fft.fft(self, n, dim, norm=norm)": "fft_fft",
    "torch.fft.rfft(self, n, dim, norm=norm)": "fft_rfft",
    "torch.fft.irfft(self, n, dim, norm=norm)": "fft_irfft",
    "torch.fft.fftn(self, s, dim, norm=norm)": "fft_fftn",
    "F.{op}(input, weight, bias)": "linear",
    "F.{op}(input, weight, bias, stride=stride, padding=padding, dilation=dilation,"
    " groups=groups)": "conv1d conv2d conv3d conv1d.padding conv2d.padding conv3d.padding",
    "F.{op}(input, weight, bias, stride=stride, padding=padding, output_padding=output_padding,"
    " groups=groups, dilation=dilation)": "conv_transpose1d conv_transpose2d.input"
    " conv_transpose3d.input",
    "F.{op}(query, key, value, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal,"
    " scale=scale, enable_gqa=enable_gqa)": "scaled_dot_product_attention",
    # Activations
    "F.{op}(self)": "hardsigmoid hardswish mish relu relu6 selu silu",
    "F.logsigmoid(self)": "log_sigmoid",
    "F.{op}(self, approximate=approximate)": "gelu",
    "F.{op}(self, alpha)": "elu celu",
    "F.{op}(self, negative_slope)": "leaky_relu",
    "F.{op}(self, min_val, max_val)": "hardtanh",
    "F.{op}(self, beta, threshold)": "softplus",
    "F.{op}(self, dim=dim)": "glu",
    "F.{op}(self, weight)": "prelu",
    "F.silu(self, inplace=True)": "silu_",
    "F.hardswish(self, inplace=True)": "hardswish_",
    "F.elu(self, alpha, inplace=True)": "elu_",
    "F.leaky_relu(self, negative_slope, inplace=True)": "leaky_relu_",
    "F.hardtanh(self, min_val, max_val, inplace=True)": "hardtanh_",
    "F.relu6(self, inplace=True)": "relu6_",
    "F.{op}(self, threshold, value)": "threshold",
    "F.softmax(self, dim=dim, dtype=dtype)": "softmax.int",
    "F.log_softmax(self, dim=dim, dtype=dtype)": "log_softmax.int",
    # Norms, dropout, pooling
    "F.{op}(input, normalized_shape, weight, bias, eps)": "layer_norm",
    "F.{op}(input, normalized_shape, weight, eps)": "rms_norm",
    "F.{op}(input, num_groups, weight, bias, eps)": "group_norm",
    "F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum,"
    " eps)": "batch_norm",
    "F.instance_norm(input, running_mean, running_var, weight, bias, use_input_stats, momentum,"
    " eps)": "instance_norm",
    "torch.{op}(input, normalized_shape, weight, bias, eps)": "native_layer_norm",
    "torch.{op}(input, weight, bias, running_mean, running_var, training, momentum,"
    " eps)": "native_batch_norm",
    "F.{op}(input, p, train)": "dropout alpha_dropout feature_alpha_dropout",
    "F.dropout(self, p, train, inplace=True)": "dropout_",
    "torch.{op}(input, p, train)": "feature_dropout native_dropout",
    "F.{op}(self, lower, upper, training)": "rrelu",
    "torch.{op}(input, hx, params, has_biases, num_layers, dropout, train, bidirectional,"
    " batch_first)": "gru.input lstm.input rnn_relu.input rnn_tanh.input",
    "F.{op}(self, kernel_size, stride=stride, padding=padding, dilation=dilation,"
    " ceil_mode=ceil_mode)": "max_pool1d max_pool2d max_pool3d",
    "F.{op}(self, kernel_size, stride=stride, padding=padding, ceil_mode=ceil_mode,"
    " count_include_pad=count_include_pad)": "avg_pool1d avg_pool2d avg_pool3d",
    "F.{op}(self, kernel_size, stride=stride, padding=padding, ceil_mode=ceil_mode,"
    " count_include_pad=count_include_pad,"
    " divisor_override=divisor_override)": "avg_pool2d avg_pool3d",
    "F.{op}(self, output_size)": "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d",
    "F.interpolate(input, size=output_size, scale_factor=scale_factors)": "upsample_nearest1d.vec"
    " upsample_nearest2d.vec upsample_nearest3d.vec",
    "F.interpolate(input, size=output_size, scale_factor=scale_factors, mode='bilinear',"
    " align_corners=align_corners)": "upsample_bilinear2d.vec",
    "F.interpolate(input, size=output_size, scale_factor=scale_factors, mode='bicubic',"
    " align_corners=align_corners)": "upsample_bicubic2d.vec",
    "F.unfold(self, kernel_size, dilation=dilation, padding=padding, stride=stride)": "im2col",
    "F.fold(self, output_size, kernel_size, dilation=dilation, padding=padding,"
    " stride=stride)": "col2im",
    # Losses
    "F.cross_entropy(self, target, weight=weight, ignore_index=ignore_index, reduction=reduction,"
    " label_smoothing=label_smoothing)": "cross_entropy_loss",
    "F.nll_loss(self, target, weight=weight, ignore_index=ignore_index,"
    " reduction=reduction)": "nll_loss_nd",
    "F.{op}(self, target, reduction=reduction)": "l1_loss mse_loss",
    "F.{op}(self, target, reduction=reduction, beta=beta)": "smooth_l1_loss",
    "F.{op}(self, target, reduction=reduction, delta=delta)": "huber_loss",
    "F.{op}(x1, x2, dim=dim, eps=eps)": "cosine_similarity",
    "F.{op}(self, target, weight=weight, reduction=reduction)": "binary_cross_entropy",
    "F.{op}(self, target, weight=weight, pos_weight=pos_weight,"
    " reduction=reduction)": "binary_cross_entropy_with_logits",
    # Tensors from nothing
    "torch.{op}(size, dtype=dtype, device=device)": "zeros ones rand randn",
    "torch.empty(size, dtype=dtype, device=device)": "empty.memory_format",
    "torch.{op}(size, fill_value, dtype=dtype, device=device)": "full",
    "torch.{op}(s, dtype=dtype, device=device)": "scalar_tensor",
    "torch.{op}(high, size, dtype=dtype, device=device)": "randint",
    "torch.{op}(low, high, size, dtype=dtype, device=device)": "randint.low",
    "torch.{op}(n, dtype=dtype, device=device)": "eye randperm",
    "torch.{op}(n, m, dtype=dtype, device=device)": "eye.m",
    "torch.{op}(end, dtype=dtype, device=device)": "arange",
    "torch.{op}(start, end, dtype=dtype, device=device)": "arange.start",
    "torch.{op}(start, end, step, dtype=dtype, device=device)": "arange.start_step",
    "torch.{op}(start, end, steps, dtype=dtype, device=device)": "linspace",
    "torch.{op}(self, dtype=dtype, device=device, memory_format=memory_format)": "empty_like"
    " ones_like rand_like randn_like zeros_like",
    "torch.{op}(self, fill_value, dtype=dtype, device=device,"
    " memory_format=memory_format)": "full_like",
    "self.{op}(size, dtype=dtype, device=device)": "new_empty new_ones new_zeros",
    "self.{op}(size, fill_value, dtype=dtype, device=device)": "new_full",
}


@dataclass(frozen=True)
class Spelling:
    """One way to write an operator, in the argument names of its schema."""

    text: str

    @cached_property
    def names(self) -> frozenset[str]:
        """The arguments that it covers; switches of the capturing machine count as covered."""
        names = {node.id for node in ast.walk(ast.parse(self.text)) if isinstance(node, ast.Name)}
        return frozenset(names - MODULES | SWITCHES)


@cache
def _by_operator() -> Mapping[str, tuple[Spelling, ...]]:
    """The table, by operator."""
    spellings: dict[str, tuple[Spelling, ...]] = defaultdict(tuple)
    for text, operators in SPELLINGS.items():
        for operator in operators.split():
            name, _, overload = operator.partition(".")
            spelling = Spelling(text.replace("{op}", name))
            spellings[f"{name}.{overload or 'default'}"] += (spelling,)
    return dict(spellings)


def spellings(key: str) -> tuple[Spelling, ...]:
    """The ways to write an operator such as `add.Tensor`, the best first."""
    return _by_operator().get(key, ())


def fill(spelling: Spelling, call: BoundCall) -> str:
    """The spelling with the arguments of a call in the place of their names."""
    return ast.unparse(_Fill(call).visit(ast.parse(spelling.text, mode="eval")))


class _Fill(ast.NodeTransformer):
    """Every name becomes the source of that argument; `ast` prints a name verbatim."""

    def __init__(self, call: BoundCall) -> None:
        self.call = call

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return node if node.id in MODULES else ast.Name(self.call.brief(node.id))

    def visit_Constant(self, node: ast.Constant) -> ast.Name:
        return ast.Name(literal(node.value))

    def visit_BinOp(self, node: ast.BinOp) -> ast.BinOp:
        """`-2 ** x` would be `-(2 ** x)`."""
        self.generic_visit(node)
        left = node.left
        if isinstance(node.op, ast.Pow) and isinstance(left, ast.Name) and left.id[0] == "-":
            left.id = f"({left.id})"
        return node

    def visit_Call(self, node: ast.Call) -> ast.Call:
        """Leave out arguments with defaults; those after a gap are passed by keyword."""
        arguments: list[ast.expr] = []
        keywords: list[ast.keyword] = []
        for position, item in enumerate(node.args):
            if isinstance(item, ast.Starred):
                arguments += self._spread(_name(item.value))
            elif _name(item) not in self.call.defaults and len(arguments) >= position:
                arguments.append(self.visit(item))
            else:
                keywords += self._keyword(_name(item), item)
        for keyword in node.keywords:
            keywords += self._keyword(keyword.arg, keyword.value)
        return ast.Call(self.visit(node.func), arguments, keywords)

    def _keyword(self, name: str | None, value: ast.expr) -> list[ast.keyword]:
        """The argument by keyword, unless it may be left out; expressions that are no argument may
        not."""
        if _name(value) and self.call.needs_no_keyword(_name(value)):
            return []
        return [ast.keyword(name, self.visit(value))]

    def _spread(self, name: str) -> list[ast.expr]:
        """A list as separate arguments: `x.view(2, 3)`, but `x.view(())`."""
        values = self.call.values[name]
        if not isinstance(values, list | tuple):
            return [ast.Name(f"*{self.call.text(name)}")]
        texts = [literal(item, self.call.operand) for item in values] or ["()"]
        return [ast.Name(text) for text in texts]


def _name(node: ast.expr) -> str:
    """The name of the argument that a part of a spelling is; "" if it is none."""
    return node.id if isinstance(node, ast.Name) else ""
