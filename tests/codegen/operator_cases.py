"""Calls of ATen operators, each before the Python that it is to become.

The names are those of the tensors in `test_operators.py`; no overload means `.default`.
"""

CASES = {
    # Operators of the language
    "add.Tensor(x, y)": "x + y",
    "add.Tensor(x, y, alpha=2)": "torch.add(x, y, alpha=2)",
    "add.Tensor(x, 1)": "x + 1",
    "add.Scalar(x, 1.5)": "x + 1.5",
    "add.Scalar(x, 1.5, 2)": "torch.add(x, 1.5, alpha=2)",
    "sub.Tensor(x, y)": "x - y",
    "sub.Tensor(x, -1.0)": "x - -1.0",
    "sub.Tensor(x, y, alpha=3)": "torch.sub(x, y, alpha=3)",
    "sub.Scalar(x, 1)": "x - 1",
    "rsub.Scalar(x, 1.0)": "1.0 - x",
    "rsub.Scalar(x, 1.0, 2)": "torch.rsub(x, 1.0, alpha=2)",
    "mul.Tensor(x, y)": "x * y",
    "mul.Tensor(x, -0.5)": "x * -0.5",
    "mul.Tensor(x, inf)": 'x * float("inf")',
    "mul.Tensor(x, nan)": 'x * float("nan")',
    "mul.Scalar(x, 2)": "x * 2",
    "div.Tensor(x, y)": "x / y",
    "div.Scalar(x, 3)": "x / 3",
    "floor_divide(ids, ids1)": "ids // ids1",
    "floor_divide(ids, 2)": "ids // 2",
    "floor_divide.Scalar(ids, 2)": "ids // 2",
    "remainder.Tensor(x, y)": "x % y",
    "remainder.Scalar(ids, 2)": "ids % 2",
    "remainder.Scalar_Tensor(2, ids1)": "2 % ids1",
    "pow.Tensor_Scalar(p, -0.5)": "p ** -0.5",
    "pow.Tensor_Tensor(p, x)": "p ** x",
    "pow.Scalar(2, x)": "2 ** x",
    "pow.Scalar(-2, ids)": "(-2) ** ids",
    "pow.Scalar(10000.0, x)": "10000.0 ** x",
    "matmul(z, b)": "z @ b",
    "neg(x)": "-x",
    "bitwise_not(mask)": "~mask",
    "alias(x)": "x[...]",
    "alias(s)": "s[...]",
    # Element by element
    "nonzero(ids)": "torch.nonzero(ids)",
    "bernoulli(p)": "torch.bernoulli(p)",
    "view_as_complex(pairs)": "torch.view_as_complex(pairs)",
    "view_as_real(spectrum)": "torch.view_as_real(spectrum)",
    "div.Tensor_mode(x, y, rounding_mode='floor')": 'torch.div(x, y, rounding_mode="floor")',
    "div.Tensor_mode(x, y, rounding_mode=None)": "torch.div(x, y)",
    "div.Scalar_mode(x, 2, rounding_mode='trunc')": 'torch.div(x, 2, rounding_mode="trunc")',
    "addcdiv(x, y, p)": "torch.addcdiv(x, y, p)",
    "addcdiv(x, y, p, value=0.5)": "torch.addcdiv(x, y, p, value=0.5)",
    "addcmul(x, y, p)": "torch.addcmul(x, y, p)",
    "nan_to_num(x)": "torch.nan_to_num(x)",
    "nan_to_num(x, 0.0, 1.0, -1.0)": "torch.nan_to_num(x, nan=0.0, posinf=1.0, neginf=-1.0)",
    "polar(p, p1)": "torch.polar(p, p1)",
    "complex(x, y)": "torch.complex(x, y)",
    "where.self(mask, x, y)": "torch.where(mask, x, y)",
    "where.ScalarOther(mask, x, -3.4028234663852886e+38)": (
        "torch.where(mask, x, -3.4028234663852886e+38)"
    ),
    "where.ScalarSelf(mask, 0.0, x)": "torch.where(mask, 0.0, x)",
    "clamp(x, 0, 1)": "x.clamp(0, 1)",
    "clamp(x, None, 0.5)": "x.clamp(max=0.5)",
    "clamp(x, 0.5)": "x.clamp(0.5)",
    "clamp.Tensor(x, y)": "x.clamp(y)",
    "clamp.Tensor(x, None, y)": "x.clamp(max=y)",
    "clamp_(x, 0, 1)": "x.clamp_(0, 1)",
    "clamp_.Tensor(x, y)": "x.clamp_(y)",
    "masked_fill.Scalar(x, mask, -inf)": 'x.masked_fill(mask, -float("inf"))',
    "masked_fill.Tensor(x, mask, s)": "x.masked_fill(mask, s)",
    "masked_fill_.Scalar(x, mask, 0)": "x.masked_fill_(mask, 0)",
    "masked_fill_.Tensor(x, mask, s)": "x.masked_fill_(mask, s)",
    # In place, and methods without arguments
    "all(mask)": "mask.all()",
    "any(mask)": "mask.any()",
    "max(x)": "x.max()",
    "min(x)": "x.min()",
    "item(s)": "s.item()",
    "detach(x)": "x.detach()",
    "squeeze(c1)": "c1.squeeze()",
    "t(x)": "x.t()",
    "add_.Tensor(x, 1)": "x.add_(1)",
    "add_.Tensor(x, y, alpha=2)": "x.add_(y, alpha=2)",
    "add_.Scalar(x, 1)": "x.add_(1)",
    "reshape_as(x, x)": "x.reshape_as(x)",
    "type_as(x, ids)": "x.type_as(ids)",
    "pow_.Scalar(x, 2)": "x.pow_(2)",
    "pow_.Tensor(p, p1)": "p.pow_(p1)",
    "fill_.Scalar(x, 1)": "x.fill_(1)",
    "fill_.Tensor(x, s)": "x.fill_(s)",
    "copy_(x, y)": "x.copy_(y)",
    "bernoulli_.float(x, 0.25)": "x.bernoulli_(0.25)",
    "bernoulli_.float(x)": "x.bernoulli_()",
    "normal_(x)": "x.normal_()",
    "normal_(x, 0.0, 0.02)": "x.normal_(std=0.02)",
    "uniform_(x)": "x.uniform_()",
    "uniform_(x, -1.0, 2.0)": "x.uniform_(-1.0, 2.0)",
    "uniform_(x, -1.0)": "x.uniform_(-1.0)",
    "exponential_(x)": "x.exponential_()",
    "exponential_(x, 0.5)": "x.exponential_(0.5)",
    # Shape, layout, dtype
    "expand(c1, [-1, 6])": "c1.expand(-1, 6)",
    "expand(s, [])": "s.expand(())",
    "view(x, [2, -1, 6])": "x.view(2, -1, 6)",
    "view(x, [24])": "x.view(-1)",
    "view(z, [2, 4, 3, 2])": "z.view(*z.shape[:2], 3, 2)",
    "view(z, [2, 4, 6, 1])": "z.view(*z.shape, 1)",
    "view(z, [2, 24])": "z.view(z.shape[0], -1)",
    "view(z, [2, 4, -1, 2])": "z.view(*z.shape[:2], -1, 2)",
    "expand(z, [2, 4, 6])": "z.expand(-1, -1, -1)",
    "expand(z, [3, 2, 4, 6])": "z.expand(3, -1, -1, -1)",
    "view(z, [4, 2, 6])": "z.view(4, 2, 6)",
    "reshape(z, [8, 6])": "z.reshape(-1, 6)",
    "view(s, [])": "s.view(())",
    "reshape(x, [-1])": "x.reshape(-1)",
    "flip(x, [0])": "x.flip(0)",
    "flip(x, [0, 1])": "x.flip(0, 1)",
    "permute(z, [2, 0, 1])": "z.permute(2, 0, 1)",
    "tile(x, [2, 1])": "x.tile(2, 1)",
    "repeat(x, [2, 1, 1])": "x.repeat(2, 1, 1)",
    "unsqueeze(x, -1)": "x.unsqueeze(-1)",
    "unsqueeze_(x, 0)": "x.unsqueeze_(0)",
    "squeeze.dim(c1, -1)": "c1.squeeze(-1)",
    "squeeze.dims(c1, [0, 1])": "c1.squeeze((0, 1))",
    "unbind.int(x)": "x.unbind()",
    "unbind.int(z, -1)": "z.unbind(-1)",
    "transpose.int(z, 1, 2)": "z.transpose(1, 2)",
    "swapaxes(x, 0, 1)": "x.swapaxes(0, 1)",
    "broadcast_to(c1, [2, 4, 6])": "c1.broadcast_to((2, 4, 6))",
    "movedim.int(z, 0, -1)": "z.movedim(0, -1)",
    "movedim.intlist(z, [0, 1], [1, 2])": "z.movedim((0, 1), (1, 2))",
    "flatten.using_ints(z)": "z.flatten()",
    "flatten.using_ints(z, 1)": "z.flatten(1)",
    "flatten.using_ints(z, 0, 1)": "z.flatten(end_dim=1)",
    "unflatten.int(x, 1, [2, 3])": "x.unflatten(1, (2, 3))",
    "narrow(x, 1, 0, 3)": "x.narrow(1, 0, 3)",
    "diagonal(x)": "x.diagonal()",
    "diagonal(z, 1, 1, 2)": "z.diagonal(1, dim1=1, dim2=2)",
    "unfold(x, 1, 3, 2)": "x.unfold(1, 3, 2)",
    "numpy_T(x)": "x.T",
    "imag(spectrum)": "spectrum.imag",
    "_conj(spectrum)": "torch.conj(spectrum)",
    "conj_physical(spectrum)": "torch.conj_physical(spectrum)",
    "resolve_conj(spectrum)": "torch.resolve_conj(spectrum)",
    "resolve_neg(x)": "torch.resolve_neg(x)",
    "mT(z)": "z.mT",
    "real(spectrum)": "spectrum.real",
    "sym_size.int(x, 0)": "x.shape[0]",
    "contiguous(x)": "x.contiguous()",
    "contiguous(image, memory_format=torch.channels_last)": (
        "image.contiguous(memory_format=torch.channels_last)"
    ),
    "clone(x)": "x.clone()",
    "clone(image, memory_format=torch.channels_last)": (
        "image.clone(memory_format=torch.channels_last)"
    ),
    "clone(x, memory_format=torch.contiguous_format)": (
        "x.clone(memory_format=torch.contiguous_format)"
    ),
    "lift_fresh_copy(s)": "s.clone()",
    "to.dtype(x, torch.float64)": "x.to(torch.float64)",
    "to.dtype(x, torch.float32, False, True)": "x.to(torch.float32, copy=True)",
    "to.dtype(ids, torch.bool)": "ids.to(torch.bool)",
    "to.dtype_layout(x, dtype=torch.float64, layout=torch.strided, device=cpu)": (
        "x.to(DEVICE, torch.float64)"
    ),
    "to.dtype_layout(x, dtype=torch.float64)": "x.to(torch.float64)",
    "to.dtype_layout(x, device=cpu)": "x.to(DEVICE)",
    "to.device(x, cpu, torch.float64)": "x.to(DEVICE, torch.float64)",
    "to.device(x, cpu, torch.float32, False, True)": "x.to(DEVICE, torch.float32, copy=True)",
    "to.other(ids, x)": "ids.to(x)",
    "cat([x, y])": "torch.cat([x, y])",
    "cat([x, y], -1)": "torch.cat([x, y], dim=-1)",
    "concat([x, y], -1)": "torch.concat([x, y], dim=-1)",
    "stack([x, y])": "torch.stack([x, y])",
    "stack([x, y], 1)": "torch.stack([x, y], dim=1)",
    "broadcast_tensors([x, c1])": "torch.broadcast_tensors(x, c1)",
    "meshgrid.indexing([w, c], indexing='ij')": 'torch.meshgrid(w, c, indexing="ij")',
    "split.Tensor(x, 2)": "x.split(2)",
    "split.Tensor(x, 3, -1)": "x.split(3, dim=-1)",
    "split_with_sizes(x, [2, 4], 1)": "x.split((2, 4), dim=1)",
    "chunk(x, 2, -1)": "x.chunk(2, dim=-1)",
    "roll(z, [-2, -2], [1, 2])": "torch.roll(z, (-2, -2), (1, 2))",
    "roll(x, [1])": "torch.roll(x, 1)",
    "roll(x, [1], [-1])": "torch.roll(x, 1, -1)",
    "tril(x)": "torch.tril(x)",
    "triu(x, 1)": "torch.triu(x, diagonal=1)",
    "repeat_interleave.self_int(x, 2)": "x.repeat_interleave(2)",
    "repeat_interleave.self_int(x, 2, -1)": "x.repeat_interleave(2, dim=-1)",
    "pad(x, [0, 1])": "F.pad(x, (0, 1))",
    "pad(ids, [0, 1], 'constant', -100.0)": "F.pad(ids, (0, 1), value=-100.0)",
    "pad(z, [1, 1], 'reflect')": 'F.pad(z, (1, 1), mode="reflect")',
    "pixel_shuffle(image, 2)": "F.pixel_shuffle(image, 2)",
    # Looking up and storing
    "gather(x, 1, ids)": "torch.gather(x, 1, ids)",
    "index_select(x, 0, i)": "torch.index_select(x, 0, i)",
    "index_fill.int_Scalar(x, 0, i, 1.0)": "x.index_fill(0, i, 1.0)",
    "scatter_reduce.two(x, 1, ids, y, 'amax', include_self=False)": (
        'x.scatter_reduce(1, ids, y, "amax", include_self=False)'
    ),
    "scatter_reduce_.two(x, 1, ids, y, 'sum')": 'x.scatter_reduce_(1, ids, y, "sum")',
    "masked_select(x, mask)": "torch.masked_select(x, mask)",
    "bucketize.Tensor(x, sorted_w)": "torch.bucketize(x, sorted_w)",
    "bucketize.Tensor(x, sorted_w, right=True)": "torch.bucketize(x, sorted_w, right=True)",
    "index_add(x, 0, i, y)": "x.index_add(0, i, y)",
    "index_add_(x, 0, i, y, alpha=2)": "x.index_add_(0, i, y, alpha=2)",
    "index_put(x, [i], y)": "x.index_put([i], y)",
    "index_put_(x, [i, i], c, True)": "x.index_put_([i, i], c, accumulate=True)",
    "one_hot(ids)": "F.one_hot(ids)",
    "one_hot(ids, 7)": "F.one_hot(ids, 7)",
    "embedding(x, i)": "F.embedding(i, x)",
    "embedding(x, i, 0)": "F.embedding(i, x, 0)",
    "embedding(x, i, -1)": "F.embedding(i, x)",
    "embedding(x, i, 0, True)": "F.embedding(i, x, 0, scale_grad_by_freq=True)",
    "embedding(x, i, -1, False, True)": "F.embedding(i, x, sparse=True)",
    "embedding_bag.padding_idx(x, i, i1, False, 0, False, None, False, None)": (
        "torch.embedding_bag(x, i, i1, False, 0, False, None, False, None)"
    ),
    # Reductions, order
    "mean(x, dtype=torch.float64)": "x.mean(dtype=torch.float64)",
    "sum(ids, dtype=torch.float32)": "ids.sum(dtype=torch.float32)",
    "mean.dim(x, [-1], True)": "x.mean(-1, keepdim=True)",
    "mean.dim(z, [-2, -1])": "z.mean((-2, -1))",
    "mean.dim(x, None, True)": "x.mean(None, keepdim=True)",
    "sum.dim_IntList(x, [1])": "x.sum(1)",
    "sum.dim_IntList(x, [1], True, dtype=torch.float64)": (
        "x.sum(1, keepdim=True, dtype=torch.float64)"
    ),
    "sum.dim_IntList(x, None)": "x.sum(None)",
    "prod.dim_int(x, 1)": "x.prod(1)",
    "amax(x, [-1])": "x.amax(dim=-1)",
    "amax(x)": "x.amax()",
    "amin(x, [0], True)": "x.amin(dim=0, keepdim=True)",
    "argmax(x)": "x.argmax()",
    "argmax(x, -1)": "x.argmax(dim=-1)",
    "argmin(x, 0, True)": "x.argmin(dim=0, keepdim=True)",
    "all.dim(mask, 1)": "mask.all(dim=1)",
    "any.dim(mask, 1, True)": "mask.any(dim=1, keepdim=True)",
    "max.dim(x, -1, True)": "x.max(dim=-1, keepdim=True)",
    "min.dim(x, 1)": "x.min(dim=1)",
    "logsumexp(x, [-1])": "x.logsumexp(dim=-1)",
    "var.correction(x, [1], correction=0, keepdim=True)": "x.var(1, correction=0, keepdim=True)",
    "var.correction(x)": "x.var()",
    "std.correction(x, [0], correction=1)": "x.std(0, correction=1)",
    "var.dim(x, [1])": "x.var(1)",
    "var.dim(x, [1], False, True)": "x.var(1, unbiased=False, keepdim=True)",
    "std.dim(x, [1], False)": "x.std(1, unbiased=False)",
    "cumsum(x, 1)": "torch.cumsum(x, dim=1)",
    "cumsum(ids, 0, dtype=torch.int32)": "torch.cumsum(ids, dim=0, dtype=torch.int32)",
    "cumprod(x, 1)": "torch.cumprod(x, dim=1)",
    "topk(x, 2)": "torch.topk(x, 2)",
    "topk(x, 2, 0, False, False)": "torch.topk(x, 2, dim=0, largest=False, sorted=False)",
    "diff(x)": "torch.diff(x)",
    "diff(x, 2, 0)": "torch.diff(x, 2, dim=0)",
    "diff(x, prepend=c1)": "torch.diff(x, prepend=c1)",
    "sort(x)": "torch.sort(x)",
    "sort(x, 0, True)": "torch.sort(x, dim=0, descending=True)",
    "argsort(x)": "torch.argsort(x)",
    "argsort(x, 0, True)": "torch.argsort(x, dim=0, descending=True)",
    "histc(x, 4, 0, 3)": "torch.histc(x, bins=4, max=3)",
    "linalg_vector_norm(x)": "torch.linalg.vector_norm(x)",
    "linalg_vector_norm(x, 1, [-1], True)": "torch.linalg.vector_norm(x, 1, dim=-1, keepdim=True)",
    "linalg_vector_norm(x, 2.0, [0, 1], dtype=torch.float64)": (
        "torch.linalg.vector_norm(x, 2.0, dim=(0, 1), dtype=torch.float64)"
    ),
    # Products
    "bmm(z, z1)": "torch.bmm(z, z1)",
    "mm(x, b)": "torch.mm(x, b)",
    "mv(x, w)": "torch.mv(x, w)",
    "outer(c, c)": "torch.outer(c, c)",
    "dot(w, w)": "torch.dot(w, w)",
    "addmm(bias, x, b)": "torch.addmm(bias, x, b)",
    "addmm(bias, x, b, beta=0.5, alpha=2)": "torch.addmm(bias, x, b, beta=0.5, alpha=2)",
    "baddbmm(z2, z, z1, beta=0.0, alpha=0.35)": "torch.baddbmm(z2, z, z1, beta=0.0, alpha=0.35)",
    "addbmm(z3, z, z1)": "torch.addbmm(z3, z, z1)",
    "einsum('ij,jk->ik', [x, b])": 'torch.einsum("ij,jk->ik", x, b)',
    "einsum('ij->ji', [x])": 'torch.einsum("ij->ji", x)',
    "_weight_norm(x, c1)": "torch._weight_norm(x, c1)",
    "fft_fft(x)": "torch.fft.fft(x)",
    "fft_fft(x, None, 0)": "torch.fft.fft(x, dim=0)",
    "fft_rfft(x, 4, norm='ortho')": 'torch.fft.rfft(x, 4, norm="ortho")',
    "fft_irfft(spectrum, 5)": "torch.fft.irfft(spectrum, 5)",
    "fft_fftn(z, None, [1, 2])": "torch.fft.fftn(z, dim=(1, 2))",
    "linear(x, w6)": "F.linear(x, w6)",
    "linear(x, w6, w)": "F.linear(x, w6, w)",
    "conv1d(signal, kernel1)": "F.conv1d(signal, kernel1)",
    "conv1d(signal, kernel1, None, [2], [1])": "F.conv1d(signal, kernel1, stride=2, padding=1)",
    "conv2d(image, kernel, bias6, [2, 2], [1, 1])": (
        "F.conv2d(image, kernel, bias6, stride=2, padding=1)"
    ),
    "conv2d(image, kernel, None, [1, 2], [0, 1], [1, 1], 1)": (
        "F.conv2d(image, kernel, stride=(1, 2), padding=(0, 1))"
    ),
    "conv3d(volume, kernel3)": "F.conv3d(volume, kernel3)",
    "conv1d.padding(signal, kernel1, None, [1], 'same')": (
        'F.conv1d(signal, kernel1, padding="same")'
    ),
    "conv2d.padding(image, kernel, None, [1, 1], 'same')": (
        'F.conv2d(image, kernel, padding="same")'
    ),
    "conv3d.padding(volume, kernel3, None, [1, 1, 1], 'same')": (
        'F.conv3d(volume, kernel3, padding="same")'
    ),
    "conv_transpose1d(signal, kernelt1, None, [2])": (
        "F.conv_transpose1d(signal, kernelt1, stride=2)"
    ),
    "conv_transpose2d.input(image, kernelt2, None, [2, 2], [1, 1], [1, 1], 1, [1, 1])": (
        "F.conv_transpose2d(image, kernelt2, stride=2, padding=1, output_padding=1)"
    ),
    "conv_transpose3d.input(volume, kernelt3)": "F.conv_transpose3d(volume, kernelt3)",
    "scaled_dot_product_attention(q, k, v)": "F.scaled_dot_product_attention(q, k, v)",
    "scaled_dot_product_attention(q, k, v, None, 0.1)": (
        "F.scaled_dot_product_attention(q, k, v, dropout_p=0.1 if self.training else 0.0)"
    ),
    "scaled_dot_product_attention(q, k, v, am, scale=0.125)": (
        "F.scaled_dot_product_attention(q, k, v, attn_mask=am, scale=0.125)"
    ),
    "scaled_dot_product_attention(q, kg, vg, None, 0.0, True, scale=0.5, enable_gqa=True)": (
        "F.scaled_dot_product_attention(q, kg, vg, is_causal=True, scale=0.5, enable_gqa=True)"
    ),
    # Activations
    "log_sigmoid(x)": "F.logsigmoid(x)",
    "gelu(x)": "F.gelu(x)",
    "gelu(x, approximate='tanh')": 'F.gelu(x, approximate="tanh")',
    "elu(x)": "F.elu(x)",
    "elu(x, 0.5)": "F.elu(x, 0.5)",
    "celu(x, 0.5)": "F.celu(x, 0.5)",
    "leaky_relu(x, 0.2)": "F.leaky_relu(x, 0.2)",
    "hardtanh(x)": "F.hardtanh(x)",
    "hardtanh(x, 0.0, 0.5)": "F.hardtanh(x, 0.0, 0.5)",
    "softplus(x)": "F.softplus(x)",
    "softplus(x, 2, 10)": "F.softplus(x, 2, 10)",
    "glu(x)": "F.glu(x)",
    "glu(x, 0)": "F.glu(x, dim=0)",
    "prelu(image, w4)": "F.prelu(image, w4)",
    "silu_(x)": "F.silu(x, inplace=True)",
    "hardswish_(x)": "F.hardswish(x, inplace=True)",
    "elu_(x)": "F.elu(x, inplace=True)",
    "leaky_relu_(x, 0.2)": "F.leaky_relu(x, 0.2, inplace=True)",
    "hardtanh_(x, 0.0, 0.5)": "F.hardtanh(x, 0.0, 0.5, inplace=True)",
    "relu6_(x)": "F.relu6(x, inplace=True)",
    "threshold(x, 0.1, 0)": "F.threshold(x, 0.1, 0)",
    "softmax.int(x, -1)": "F.softmax(x, dim=-1)",
    "softmax.int(x, 0, torch.float64)": "F.softmax(x, dim=0, dtype=torch.float64)",
    "log_softmax.int(x, -1)": "F.log_softmax(x, dim=-1)",
    # Norms, dropout, pooling
    "layer_norm(x, [6], w, w, 1e-05, False)": "F.layer_norm(x, (6,), w, w, 1e-05)",
    "layer_norm(x, [6])": "F.layer_norm(x, (6,))",
    "layer_norm(z, [4, 6], None, None, 1e-12, True)": "F.layer_norm(z, (4, 6), eps=1e-12)",
    "rms_norm(x, [6], w, None)": "F.rms_norm(x, (6,), w)",
    "rms_norm(x, [6], w, 1e-06)": "F.rms_norm(x, (6,), w, 1e-06)",
    "rms_norm(x, [6])": "F.rms_norm(x, (6,))",
    "group_norm(image, 2, w4, w4, 1e-06)": "F.group_norm(image, 2, w4, w4, 1e-06)",
    "group_norm(image, 2)": "F.group_norm(image, 2)",
    "batch_norm(image, w4, w4, m4, v4, True, 0.1, 1e-05, True)": (
        "F.batch_norm(image, m4, v4, w4, w4, self.training, 0.1, 1e-05)"
    ),
    "batch_norm(image, w4, w4, m4, v4, False, 0.1, 1e-05, False)": (
        "F.batch_norm(image, m4, v4, w4, w4, False, 0.1, 1e-05)"
    ),
    "batch_norm(image, None, None, None, None, True, 0.1, 1e-05, True)": (
        "F.batch_norm(image, None, None, None, None, True, 0.1, 1e-05)"
    ),
    "instance_norm(image, w4, w4, m4, v4, True, 0.1, 1e-05, True)": (
        "F.instance_norm(image, m4, v4, w4, w4, self.training, 0.1, 1e-05)"
    ),
    "instance_norm(image, None, None, None, None, True, 0.1, 1e-05, True)": (
        "F.instance_norm(image, None, None, None, None, True, 0.1, 1e-05)"
    ),
    "native_layer_norm(x, [6], w, w, 1e-05)": "torch.native_layer_norm(x, (6,), w, w, 1e-05)",
    "native_batch_norm(image, w4, w4, m4, v4, True, 0.1, 1e-05)": (
        "torch.native_batch_norm(image, w4, w4, m4, v4, self.training, 0.1, 1e-05)"
    ),
    "dropout(x, 0.1, True)": "F.dropout(x, 0.1, self.training)",
    "dropout(x, 0.1, False)": "F.dropout(x, 0.1, False)",
    "alpha_dropout(x, 0.1, True)": "F.alpha_dropout(x, 0.1, self.training)",
    "feature_alpha_dropout(image, 0.5, True)": "F.feature_alpha_dropout(image, 0.5, self.training)",
    "dropout_(x, 0.5, True)": "F.dropout(x, 0.5, self.training, inplace=True)",
    "feature_dropout(image, 0.5, True)": "torch.feature_dropout(image, 0.5, self.training)",
    "native_dropout(x, 0.5, True)": "torch.native_dropout(x, 0.5, self.training)",
    "rrelu(x, 0.1, 0.3, True)": "F.rrelu(x, 0.1, 0.3, self.training)",
    "rrelu(x)": "F.rrelu(x)",
    "gru.input(z, h, [gih, ghh], False, 1, 0.5, True, False, True)": (
        "torch.gru(z, h, [gih, ghh], False, 1, 0.5, self.training, False, True)"
    ),
    "lstm.input(z, [h, h], [wih, whh], False, 1, 0.5, True, False, True)": (
        "torch.lstm(z, [h, h], [wih, whh], False, 1, 0.5, self.training, False, True)"
    ),
    "rnn_relu.input(z, h, [rih, rhh], False, 1, 0.0, False, False, True)": (
        "torch.rnn_relu(z, h, [rih, rhh], False, 1, 0.0, False, False, True)"
    ),
    "rnn_tanh.input(z, h, [rih, rhh], False, 1, 0.0, False, False, True)": (
        "torch.rnn_tanh(z, h, [rih, rhh], False, 1, 0.0, False, False, True)"
    ),
    "max_pool1d(signal, [2])": "F.max_pool1d(signal, 2)",
    "max_pool2d(image, [3, 3], [2, 2], [1, 1])": "F.max_pool2d(image, 3, stride=2, padding=1)",
    "max_pool2d(image, [2, 2])": "F.max_pool2d(image, 2)",
    "max_pool3d(volume, [2, 2, 2])": "F.max_pool3d(volume, 2)",
    "avg_pool1d(signal, [2], [2])": "F.avg_pool1d(signal, 2, stride=2)",
    "avg_pool2d(image, [2, 2], [2, 2])": "F.avg_pool2d(image, 2, stride=2)",
    "avg_pool2d(image, [2, 2], [2, 2], [0, 0], False, True, 3)": (
        "F.avg_pool2d(image, 2, stride=2, divisor_override=3)"
    ),
    "adaptive_avg_pool1d(signal, [1])": "F.adaptive_avg_pool1d(signal, 1)",
    "adaptive_avg_pool2d(image, [1, 1])": "F.adaptive_avg_pool2d(image, 1)",
    "adaptive_avg_pool2d(image, [1, 2])": "F.adaptive_avg_pool2d(image, (1, 2))",
    "adaptive_avg_pool3d(volume, [1, 1, 1])": "F.adaptive_avg_pool3d(volume, 1)",
    "upsample_nearest1d.vec(signal, None, [2.0])": "F.interpolate(signal, scale_factor=(2.0,))",
    "upsample_nearest2d.vec(image, [16, 12], None)": "F.interpolate(image, size=(16, 12))",
    "upsample_nearest2d.vec(image, None, [2.0, 2.0])": (
        "F.interpolate(image, scale_factor=(2.0, 2.0))"
    ),
    "upsample_nearest3d.vec(volume, [8, 8, 8], None)": "F.interpolate(volume, size=(8, 8, 8))",
    "upsample_bilinear2d.vec(image, [16, 12], False, None)": (
        'F.interpolate(image, size=(16, 12), mode="bilinear", align_corners=False)'
    ),
    "upsample_bilinear2d.vec(image, None, True, [2.0, 1.5])": (
        'F.interpolate(image, scale_factor=(2.0, 1.5), mode="bilinear", align_corners=True)'
    ),
    "upsample_bicubic2d.vec(image, [16, 12], False, None)": (
        'F.interpolate(image, size=(16, 12), mode="bicubic", align_corners=False)'
    ),
    "im2col(image, [2, 2], [1, 1], [0, 0], [2, 2])": (
        "F.unfold(image, 2, dilation=1, padding=0, stride=2)"
    ),
    "col2im(patches, [8, 8], [2, 2], [1, 1], [0, 0], [2, 2])": (
        "F.fold(patches, 8, 2, dilation=1, padding=0, stride=2)"
    ),
    # Losses
    "cross_entropy_loss(x, i)": "F.cross_entropy(x, i)",
    "cross_entropy_loss(x, i, cw, 2, -1, 0.1)": (
        'F.cross_entropy(x, i, weight=cw, ignore_index=-1, reduction="sum", label_smoothing=0.1)'
    ),
    "cross_entropy_loss(x, i, None, 0)": 'F.cross_entropy(x, i, reduction="none")',
    "nll_loss_nd(x, i)": "F.nll_loss(x, i)",
    "nll_loss_nd(x, i, None, 2, 0)": 'F.nll_loss(x, i, ignore_index=0, reduction="sum")',
    "l1_loss(x, y)": "F.l1_loss(x, y)",
    "mse_loss(x, y)": "F.mse_loss(x, y)",
    "mse_loss(x, y, 2)": 'F.mse_loss(x, y, reduction="sum")',
    "smooth_l1_loss(x, y)": "F.smooth_l1_loss(x, y)",
    "smooth_l1_loss(x, y, 2, 0.5)": 'F.smooth_l1_loss(x, y, reduction="sum", beta=0.5)',
    "huber_loss(x, y, 1, 0.5)": "F.huber_loss(x, y, delta=0.5)",
    "cosine_similarity(x, y)": "F.cosine_similarity(x, y)",
    "cosine_similarity(x, y, -1, 1e-6)": "F.cosine_similarity(x, y, dim=-1, eps=1e-06)",
    "binary_cross_entropy(p, p1)": "F.binary_cross_entropy(p, p1)",
    "binary_cross_entropy(p, p1, None, 2)": 'F.binary_cross_entropy(p, p1, reduction="sum")',
    "binary_cross_entropy_with_logits(x, p)": "F.binary_cross_entropy_with_logits(x, p)",
    "binary_cross_entropy_with_logits(x, p, None, cw, 2)": (
        'F.binary_cross_entropy_with_logits(x, p, pos_weight=cw, reduction="sum")'
    ),
    # Tensors from nothing
    "zeros([2, 3], dtype=torch.int64, device=cpu, pin_memory=False)": (
        "torch.zeros((2, 3), dtype=torch.int64, device=DEVICE)"
    ),
    "zeros([])": "torch.zeros((), device=DEVICE)",
    "ones([2], dtype=torch.bool)": "torch.ones((2,), dtype=torch.bool, device=DEVICE)",
    "randn([2])": "torch.randn((2,), device=DEVICE)",
    "rand([2, 1])": "torch.rand((2, 1), device=DEVICE)",
    "empty.memory_format([0])": "torch.empty((0,), device=DEVICE)",
    "full([], 0.25, dtype=torch.float32, device=cpu, pin_memory=False)": (
        "torch.full((), 0.25, dtype=torch.float32, device=DEVICE)"
    ),
    "scalar_tensor(1.0, dtype=torch.float64)": (
        "torch.scalar_tensor(1.0, dtype=torch.float64, device=DEVICE)"
    ),
    "randint(5, [2])": "torch.randint(5, (2,), device=DEVICE)",
    "randint.low(1, 5, [2], dtype=torch.int32)": (
        "torch.randint(1, 5, (2,), dtype=torch.int32, device=DEVICE)"
    ),
    "eye(3)": "torch.eye(3, device=DEVICE)",
    "randperm(4)": "torch.randperm(4, device=DEVICE)",
    "eye.m(3, 4)": "torch.eye(3, 4, device=DEVICE)",
    "arange(12, device=cpu, pin_memory=False)": "torch.arange(12, device=DEVICE)",
    "arange.start(-63, 1, dtype=torch.int32, device=cpu, pin_memory=False)": (
        "torch.arange(-63, 1, dtype=torch.int32, device=DEVICE)"
    ),
    "arange.start_step(0, 32, 2.0, dtype=torch.int64, device=cpu, pin_memory=False)": (
        "torch.arange(0, 32, 2.0, dtype=torch.int64, device=DEVICE)"
    ),
    "arange.start_step(0, 5)": "torch.arange(0, 5, device=DEVICE)",
    "linspace(0, 1, 5)": "torch.linspace(0, 1, 5, device=DEVICE)",
    "empty_like(e)": "torch.empty_like(e)",
    "rand_like(x)": "torch.rand_like(x)",
    "randn_like(x)": "torch.randn_like(x)",
    "ones_like(x, dtype=torch.int64)": "torch.ones_like(x, dtype=torch.int64)",
    "zeros_like(x, pin_memory=False)": "torch.zeros_like(x)",
    "full_like(x, 15, pin_memory=False)": "torch.full_like(x, 15)",
    "new_empty(x, [0])": "x.new_empty((0,))",
    "new_ones(x, [], dtype=torch.bool, pin_memory=False)": "x.new_ones((), dtype=torch.bool)",
    "new_zeros(x, [2, 12], pin_memory=False)": "x.new_zeros((2, 12))",
    "new_full(x, [2], 0.5)": "x.new_full((2,), 0.5)",
    # Indices
    "index.Tensor(x, [i])": "x[i]",
    "index.Tensor(x, [None, i])": "x[:, i]",
    "index.Tensor(z, [i1, None, i1])": "z[i1, :, i1]",
    "index.Tensor(x, [i, None])": "x[i]",
    "index.Tensor(x, [mask])": "x[mask]",
    "select.int(x, 0, 1)": "x[1]",
    "select.int(x, 1, -1)": "x[:, -1]",
    "select.int(z, -1, 0)": "z[..., 0]",
    "select.int(z, 2, 0)": "z[..., 0]",
    "select.int(image, -2, 3)": "image[:, :, 3]",
    "slice.Tensor(x)": "x[:]",
    "slice.Tensor(x, 0, 1, MAX)": "x[1:]",
    "slice.Tensor(x, 0, 0, -1)": "x[:-1]",
    "slice.Tensor(z, 2, 0, 4)": "z[..., :4]",
    "slice.Tensor(x, 1, 0, 5, 2)": "x[:, :5:2]",
    "slice.Tensor(x, 1, -2)": "x[:, -2:]",
    "slice.Tensor(x, 1, 0, 6)": "x[:, :6]",
    "slice.Tensor(image, 1, 1, 2)": "image[:, 1:2]",
    "slice.Tensor(image, -2, 1, 2)": "image[:, :, 1:2]",
    # By the full name
    "mul.Tensor(2, x)": "torch.ops.aten.mul.Tensor(2, x)",
    "div.Tensor(2, x)": "torch.ops.aten.div.Tensor(2, x)",
    "view.dtype(x, torch.int32)": "torch.ops.aten.view.dtype(x, torch.int32)",
    "expand(c1, [4, 6], implicit=True)": "torch.ops.aten.expand.default(c1, (4, 6), implicit=True)",
    "gather(x, 1, ids, sparse_grad=True)": (
        "torch.ops.aten.gather.default(x, 1, ids, sparse_grad=True)"
    ),
    "index_put_(x, [None, i], c1)": "torch.ops.aten.index_put_.default(x, [None, i], c1)",
    "index.Tensor(x, [s0])": "torch.ops.aten.index.Tensor(x, [s0])",
    "index.Tensor(x, [None, s0])": "torch.ops.aten.index.Tensor(x, [None, s0])",
    "embedding(x, i, -2)": "torch.ops.aten.embedding.default(x, i, -2)",
    "_native_batch_norm_legit.no_stats(image, w4, w4, True, 0.1, 1e-05)": (
        "torch.ops.aten._native_batch_norm_legit.no_stats(image, w4, w4, True, 0.1, 1e-05)"
    ),
    "embedding_bag(x, i, i1)": "torch.ops.aten.embedding_bag.default(x, i, i1)",
    "einsum('ij,jk,kl->il', [x, b, b1])": (
        'torch.ops.aten.einsum.default("ij,jk,kl->il", [x, b, b1])'
    ),
    "einsum('ij,jk->ik', [x, b], path=[0, 1])": (
        'torch.ops.aten.einsum.default("ij,jk->ik", [x, b], path=(0, 1))'
    ),
    "elu(x, 0.5, 2.0)": "torch.ops.aten.elu.default(x, 0.5, 2.0)",
    "_softmax(x, -1, False)": "torch.ops.aten._softmax.default(x, -1, False)",
    "logaddexp(x, y)": "torch.ops.aten.logaddexp.default(x, y)",
    "logit(p, 0.1)": "torch.ops.aten.logit.default(p, 0.1)",
    "norm.ScalarOpt_dim(x, 2, [1], True)": "torch.ops.aten.norm.ScalarOpt_dim(x, 2, (1,), True)",
    "_to_copy(x, dtype=torch.float64, device=cpu)": (
        "torch.ops.aten._to_copy.default(x, dtype=torch.float64, device=DEVICE)"
    ),
}

# Operators that differ in their name only: `{}` in the call, and without the overload in the text.
FAMILIES = (
    (
        "abs acos asin atan ceil cos cosh erf erfc exp exp2 expm1 floor frac isinf isnan log log10"
        " log1p log2 logical_not reciprocal round rsqrt sigmoid sign sin sinh sqrt square tan tanh"
        " trunc",
        "{}(x)",
        "torch.{}(x)",
    ),
    ("hardsigmoid hardswish mish relu relu6 selu silu", "{}(x)", "F.{}(x)"),
    (
        "abs_ ceil_ cos_ detach_ erf_ exp_ floor_ log_ logical_not_ neg_ reciprocal_ relu_ round_"
        " rsqrt_ sigmoid_ sin_ sqrt_ square_ tanh_ zero_ mean sum prod",
        "{}(x)",
        "x.{}()",
    ),
    (
        "atan2 logical_and logical_or logical_xor maximum minimum multiply.Tensor max.other"
        " min.other rsub.Tensor",
        "{}(x, y)",
        "torch.{}(x, y)",
    ),
    (
        "div_.Tensor mul_.Tensor sub_.Tensor clamp_min.Tensor clamp_max.Tensor expand_as view_as",
        "{}(x, y)",
        "x.{}(y)",
    ),
    (
        "div_.Scalar mul_.Scalar sub_.Scalar mul_.Tensor clamp_min clamp_min_ clamp_max clamp_max_",
        "{}(x, 0.5)",
        "x.{}(0.5)",
    ),
    (
        "bitwise_and_.Tensor bitwise_or_.Tensor bitwise_xor_.Tensor floor_divide_.Tensor"
        " logical_and_ logical_or_ remainder_.Tensor",
        "{}(ids, ids1)",
        "ids.{}(ids1)",
    ),
    ("floor_divide_.Scalar remainder_.Scalar", "{}(ids, 2)", "ids.{}(2)"),
    ("lerp.Tensor", "{}(x, y, p)", "torch.{}(x, y, p)"),
    ("lerp.Scalar", "{}(x, y, 0.5)", "torch.{}(x, y, 0.5)"),
    ("scatter.src scatter_.src scatter_add scatter_add_", "{}(x, 1, ids, y)", "x.{}(1, ids, y)"),
    ("scatter.value scatter_.value", "{}(x, 1, ids, 0.5)", "x.{}(1, ids, 0.5)"),
    ("masked_scatter masked_scatter_", "{}(x, mask, y)", "x.{}(mask, y)"),
    ("index_copy index_copy_", "{}(x, 0, i, y)", "x.{}(0, i, y)"),
    ("max_pool1d", "{}(signal, [2])", "F.{}(signal, 2)"),
    ("avg_pool1d", "{}(signal, [2], [2])", "F.{}(signal, 2, stride=2)"),
    ("max_pool3d avg_pool3d", "{}(volume, [2, 2, 2])", "F.{}(volume, 2)"),
    ("adaptive_avg_pool3d", "{}(volume, [1, 1, 1])", "F.{}(volume, 1)"),
)
SIGNS = {
    "==": "eq",
    "!=": "ne",
    "<": "lt",
    "<=": "le",
    ">": "gt",
    ">=": "ge",
    "&": "__and__ bitwise_and",
    "|": "__or__ bitwise_or",
    "^": "__xor__ bitwise_xor",
}

for operators, call, text in FAMILIES:
    for operator in operators.split():
        CASES[call.format(operator)] = text.format(operator.partition(".")[0])
for sign, operators in SIGNS.items():
    for operator in operators.split():
        CASES[f"{operator}.Tensor(ids, ids1)"] = f"ids {sign} ids1"
        CASES[f"{operator}.Scalar(ids, -1)"] = f"ids {sign} -1"
