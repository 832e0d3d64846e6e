"""Rules of matrix products, convolutions, normalisations, pooling, attention and tables."""

from __future__ import annotations

from parcompiler.spmd.call import NodeCall
from parcompiler.spmd.dimensions import formula, words
from parcompiler.spmd.formula import Family, Rule
from parcompiler.spmd.strategy import SizeArgument

_PLANE = "*b (h) (w)"


def matmul(call: NodeCall) -> Rule:
    """Vectors, matrices, and batches of them with broadcasting."""
    left, right = (len(shape) for shape in call.shapes)
    if left == 1:
        return Rule("k, k -> " if right == 1 else "k, *b k n -> *b n")
    return Rule("*b m k, k -> *b m" if right == 1 else "*b m k, *b k n -> *b m n")


def product_plus(product: str, result: str) -> Family:
    """addmm and the like: a product plus a tensor, which may lack dimensions."""
    names = result.split()

    def rule(call: NodeCall) -> Rule:
        bias = names[len(names) - len(call.shapes[0]) :]
        return Rule(f"{' '.join(bias)} + {product} -> {result}")

    return rule


def einsum(call: NodeCall) -> Rule | None:
    """The equation; a letter twice in one operand is a diagonal and stays whole."""
    equation = str(call.arguments["equation"]).replace(" ", "")
    left, arrow, right = equation.partition("->")
    operands = left.split(",")
    if len(operands) != len(call.operands):
        return None
    if not arrow:
        letters = sorted({letter for letter in left if letter.isalpha()})
        once = "".join(letter for letter in letters if left.count(letter) == 1)
        right = f"...{once}" if "..." in left else once
    whole = {letter for side in (*operands, right) for letter in side if side.count(letter) > 1}

    def listed(side: str) -> list[str]:
        letters = side.replace("...", ".")
        return ["*b" if x == "." else f"({x})" if x in whole else x for x in letters]

    return Rule(formula(list(map(listed, operands)), [listed(right)]))


def grouped_mm(call: NodeCall) -> Rule | None:
    """Rows of several experts, each times its expert's matrix: rows and experts stay whole."""
    if [len(shape) for shape in call.shapes] != [2, 3, 1]:
        return None
    return Rule("(t) k, (e) k n, !(e) -> (t) n")


def convolution(call: NodeCall) -> Rule | None:
    """Over the batch, output channels, input channels, or groups of both."""
    image, weight = call.shapes[:2]
    space = " ".join(["1"] * (len(weight) - 2))
    batch = "b" if len(image) == len(weight) else ""
    groups = int(call.arguments.get("groups", 1))
    if groups > 1:
        line = f"{batch} g {space}, g 1 {space} + g -> {batch} g {space}"
        return Rule(line, (("g", SizeArgument("groups", None, groups)),))
    transposed = "transpose" in call.name or bool(call.arguments.get("transposed", False))
    channels = "c o" if transposed else "o c"
    return Rule(f"{batch} c {space}, {channels} {space} + o -> {batch} o {space}")


def layer_norm(call: NodeCall) -> Rule:
    """layer_norm and rms_norm: the normalised dimensions stay whole."""
    last = " ".join(["1"] * len(call.arguments["normalized_shape"]))
    return Rule(f"!*b {last}, {last} + {last} -> *b {last}")


def batch_norm(call: NodeCall) -> Rule:
    """Channels; in evaluation, with given statistics, all other dimensions too."""
    trains = call.arguments.get("training", call.arguments.get("use_input_stats", True))
    listed = words(len(call.shapes[0]), range(len(call.shapes[0])) if trains else ())
    listed[1] = "c"
    return _with_channels(call, listed, "c")


def group_norm(call: NodeCall) -> Rule:
    """The batch, or whole groups of channels."""
    listed = ["b", "g", *["1"] * (len(call.shapes[0]) - 2)]
    groups = int(call.arguments["num_groups"])
    return _with_channels(call, listed, "g", ("g", SizeArgument("num_groups", None, groups)))


def prelu(call: NodeCall) -> Rule:
    """One slope, or one for each channel."""
    listed = words(len(call.shapes[0]))
    return _with_channels(call, listed, listed[1] if len(listed) > 1 else "1")


def _with_channels(
    call: NodeCall, listed: list[str], channel: str, *sizes: tuple[str, SizeArgument]
) -> Rule:
    """The rule of a tensor with other operands for each channel."""
    text = " ".join(listed)
    operands = [f"!{text}", *(f"!{channel}" for _ in call.operands[1:])]
    return Rule(f"{', '.join(operands)} -> {text}", sizes)


def attention(call: NodeCall) -> Rule | None:
    """Over the batch, the heads (those of keys with theirs), rows, and value features.

    Causal masks depend on the number of a row, so rows stay whole.
    """
    grouped = bool(call.arguments.get("enable_gqa", False)) and len(call.shapes[0]) > 2
    rows = "(m)" if call.arguments.get("is_causal", False) else "m"
    outer, mask = "*b h" if grouped else "*b", ""
    if (bias := call.operand("attn_mask")) is not None:  # it may lack dimensions of the scores
        dims = len(bias.shape)
        batch = "*b h" if grouped and dims > 2 else "*b"
        mask = f", !{batch} {rows} (t)" if dims > 1 else ", !(t)"
    return Rule(f"!{outer} {rows} (e), !{outer} (t) (e), {outer} (t) d{mask} -> {outer} {rows} d")


def embedding(call: NodeCall) -> Rule | None:
    """The features, or the indices; the vocabulary needs another computation (see `special`)."""
    if call.arguments.get("scale_grad_by_freq"):
        return None
    indices = "(*b)" if call.arguments.get("sparse") else "*b"
    return Rule(f"(v) h, !{indices} -> {indices} h")


def embedding_bag(call: NodeCall) -> Rule | None:
    """The features; the other results only describe the bags."""
    if call.arguments.get("scale_grad_by_freq"):
        return None
    inputs = ["(v) h", "!(i)", "!(o)", "!(i)"][: len(call.operands)]
    rest = ["(*x)"] * (len(call.results) - 1)
    return Rule(f"{', '.join(inputs)} -> {', '.join(['(o) h', *rest])}")


RULES: dict[str, str | Family] = {
    "linear": "*b k, n k + n -> *b n",
    "mm": "m k, k n -> m n",
    "mv": "m k, k -> m",
    "dot": "k, k -> ",
    "outer": "m, n -> m n",
    "bmm": "b m k, b k n -> b m n",
    "bilinear": "*b i, *b j, n i j + n -> *b n",
    "matmul": matmul,
    "addmm": product_plus("m k, k n", "m n"),
    "addmv": product_plus("m k, k", "m"),
    "baddbmm": product_plus("b m k, b k n", "b m n"),
    "addbmm": product_plus("b m k, b k n", "m n"),
    "einsum": einsum,
    **dict.fromkeys(("grouped_mm_fallback", "_grouped_mm"), grouped_mm),
    **dict.fromkeys(
        """
        conv1d conv2d conv3d convolution conv_transpose1d conv_transpose2d conv_transpose3d
        """.split(),
        convolution,
    ),
    "max_pool1d": "!*b (w) -> *b (w)",
    "max_pool2d": f"!{_PLANE} -> {_PLANE}",
    "max_pool2d_with_indices": f"!{_PLANE} -> {_PLANE}, {_PLANE}",
    **dict.fromkeys(("avg_pool1d", "adaptive_avg_pool1d"), "*b (w) -> *b (w)"),
    **dict.fromkeys(
        """
        avg_pool2d adaptive_avg_pool2d upsample_nearest2d upsample_bilinear2d upsample_bicubic2d
        """.split(),
        f"{_PLANE} -> {_PLANE}",
    ),
    **dict.fromkeys(("layer_norm", "rms_norm"), layer_norm),
    **dict.fromkeys(("batch_norm", "instance_norm"), batch_norm),
    "group_norm": group_norm,
    "prelu": prelu,
    "scaled_dot_product_attention": attention,
    "embedding": embedding,
    "embedding_bag": embedding_bag,
}
