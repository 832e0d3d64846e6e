"""The statements that random models are made of: templates, filled with values that are there.

A template is text with places: `{f}` `{g}` `{h}` floating values (`g` and `h` of the shape of `f`
where there is one), `{i}` integers, `{b}` booleans, `{c}` complex values, `{t}` the new variable;
`{w}` the last size of `f`, `{v}` a new width, `{d}` a dimension of `f` but the first and `{s}` its
size, `{k}` a small number, `{q}` a fraction that no other statement has, `{n}` the number of the
statement. Whether a filled template makes sense is found out by running it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Template:
    """A kind of statement: what it needs in `__init__`, its text in `forward`, how often it comes.

    `exact` is of use in float64 alone: a rounding may change its value by a jump, or it has no
    16 bits.
    """

    kind: str
    text: str
    init: tuple[str, ...] = ()
    weight: float = 1.0
    exact: bool = False


def expressions(kind: str, texts: str, weight: float = 1.0, exact: bool = False) -> list[Template]:
    """Templates of one line each, which share a weight."""
    lines = [line.strip() for line in texts.strip().splitlines()]
    return [Template(kind, "{t} = " + line, (), weight / len(lines), exact) for line in lines]


def layers(kind: str, texts: str, weight: float = 1.0, exact: bool = False) -> list[Template]:
    """Templates of a layer each: what makes it | how it is called."""
    pairs = [line.split("|") for line in texts.strip().splitlines()]
    return [
        Template(kind, "{t} = " + use.strip(), (make.strip(),), weight / len(pairs), exact)
        for make, use in pairs
    ]


TEMPLATES = [
    *expressions(
        "point",
        """
        torch.tanh({f})
        F.gelu({f})
        F.relu({f})
        F.silu({f})
        torch.sigmoid({f})
        {f}.sin() + {q}
        F.leaky_relu({f}, {q})
        F.softplus({f})
        {f}.square() * 0.3
        torch.exp(-{f}.abs())
        torch.log1p({f}.square())
        {f} / (1.0 + {f}.abs())
        {f}.clamp(-1.5, 1.5)
        torch.rsqrt({f}.square() + 1.0)
        (-{f} * 0.7).contiguous()
        """,
        4.0,
    ),
    *expressions(
        "two values",
        """
        {f} + {g}
        {f} - 0.5 * {g}
        {f} * {g}
        torch.where({f} > 0, {f}, {g})
        torch.maximum({f}, {g})
        torch.addcmul({f}, {g}, {h}, value=0.5)
        {f}.lerp({g}, 0.3)
        {f} / (2.0 + {g}.square())
        torch.cat([{f}, {g}], dim=-1)
        torch.stack([{f}, {g}], dim={d})
        {f} + {g}.mean(dim=-1, keepdim=True)
        torch.hypot({f} + 3.0, {g})
        """,
        4.0,
    ),
    *expressions(
        "shape",
        """
        {f}.transpose(-1, -2)
        {f}.flatten({d})
        {f}.unsqueeze({d})
        {f}.reshape({f}.shape[0], -1)
        {f}.unflatten(-1, (2, -1))
        {f}[..., : max(1, {w} // 2)]
        {f}[:, ::2]
        {f}.flip({d})
        {f}.roll(1, {d})
        F.pad({f}, (1, 0))
        {f}.narrow({d}, 0, max(1, {s} - 1))
        {f}.select({d}, {s} - 1)
        {f}.expand_as({f}).clone()
        {f}.movedim({d}, -1)
        {f}.repeat_interleave(2, dim={d})
        torch.tril({f})
        """,
        3.0,
    ),
    *expressions(
        "sum",
        """
        {f}.mean(dim={d}, keepdim=True) + {f}
        {f}.sum(dim={d}) * 0.2
        {f} - {f}.amax(dim=-1, keepdim=True)
        {f}.softmax(dim=-1)
        {f}.log_softmax(dim={d})
        {f}.cumsum(dim={d}) * 0.3
        F.normalize({f} + 0.1, dim=-1)
        {f}.var(dim={d}, keepdim=True) + {f}
        {f}.logsumexp(dim={d})
        {f}.norm(dim={d}, keepdim=True) * {f} * 0.3
        F.layer_norm({f}, ({w},))
        """,
        2.5,
    ),
    *expressions(
        "product",
        """
        torch.matmul({f}, {g}.transpose(-1, -2)) * 0.3
        torch.einsum("b...i,b...i->b...", {f}, {g}) * 0.3
        torch.einsum("b...i,bj->b...ij", {f}, {g}.flatten(1)[:, :2])
        F.scaled_dot_product_attention({f}, {g}, {h})
        F.scaled_dot_product_attention({f}, {g}, {h}, is_causal=True)
        """,
        2.0,
    ),
    *expressions(
        "choice",
        """
        {f}.sort(dim={d}).values
        {f}.topk(min(2, {w}), dim=-1).values
        {f}.gather(-1, {f}.argsort(dim=-1))
        {f}.max(dim={d}).values
        {f} * ({f} > {g})
        {f} * F.one_hot({f}.argmax(dim=-1), {w})
        {f}.masked_fill({f} > 0.8, 0.0)
        {f} + {f}.round().detach() * 0.1
        {f}.median(dim={d}).values
        """,
        1.5,
        exact=True,
    ),
    *expressions(
        "integers",
        """
        {f} * {i}.to({f}.dtype).mean()
        F.one_hot({i} % 4, 4).to({f}.dtype)
        {f} + torch.arange({w}).to({f}.dtype) * 0.1
        {f} * ({i} % 2 == 0).to({f}.dtype).mean()
        ({i} * 2 + 1) % 5
        {f}.index_select({d}, torch.tensor([0, {s} - 1]))
        torch.where({b}.any(), {f}, -{f})
        {f}.masked_fill({b}.view(-1, *[1] * ({f}.dim() - 1)).expand_as({f}), 0.5)
        """,
        1.5,
    ),
    *expressions("detached", "{f}.detach() * 0.5 + {g}\n{f}.detach().tanh()", 0.8),
    *expressions(
        "complex",
        """
        torch.view_as_real(torch.complex({f}, {g}) * 0.5).sum(dim=-1)
        torch.fft.rfft({f}, dim=-1).abs() * 0.5
        torch.complex({f}, {g})
        {c} * {c}.conj() * 0.3
        {c}.real + {c}.imag
        torch.polar(torch.ones_like({f}), {f}).real
        torch.fft.irfft(torch.fft.rfft({f}, dim=-1), n={w}, dim=-1)
        """,
        0.8,
        exact=True,
    ),
    *layers(
        "layer",
        """
        self.linear{n} = nn.Linear({w}, {v}) | self.linear{n}({f})
        self.linear{n} = nn.Linear({w}, {w}, bias=False) | {f} + self.linear{n}({f})
        self.linear{n} = nn.Linear({w}, {w}) | F.gelu(self.linear{n}({f}))
        self.norm{n} = nn.LayerNorm({w}) | self.norm{n}({f})
        self.norm{n} = nn.RMSNorm({w}, 0.01) | self.norm{n}({f})
        self.mlp{n} = nn.Sequential(nn.Linear({w}, 5), nn.Tanh(), nn.Linear(5, {w})) | self.mlp{n}({f})
        """,  # noqa: E501
        8.0,
    ),
    *layers(
        "other layer",
        """
        self.conv{n} = nn.Conv1d({s}, {v}, 3, padding=1) | self.conv{n}({f})
        self.pool{n} = nn.AvgPool1d(2, 1) | self.pool{n}({f})
        self.gate{n} = nn.Bilinear({w}, {w}, {v}) | self.gate{n}({f}, {g})
        self.slope{n} = nn.PReLU() | self.slope{n}({f})
        self.groups{n} = nn.GroupNorm(1, {s}) | self.groups{n}({f})
        self.embed{n} = nn.Embedding(8, {v}) | self.embed{n}({i} % 8)
        self.rnn{n} = nn.Linear({w}, {w}) | torch.tanh(self.rnn{n}(torch.tanh(self.rnn{n}({f}))))
        self.pick{n} = nn.MaxPool1d(2, 1) | self.pick{n}({f})
        self.gru{n} = nn.GRU({w}, {v}, batch_first=True) | self.gru{n}({f})[0]
        self.pad{n} = nn.Embedding(8, {v}, padding_idx=0) | self.pad{n}({i} % 8)
        self.bag{n} = nn.EmbeddingBag(8, {v}, mode="sum") | self.bag{n}({i} % 8)
        self.weighed{n} = parametrizations.weight_norm(nn.Linear({w}, {v})) | self.weighed{n}({f})
        """,
        3.5,
    ),
    *layers(
        "sparse table",
        """
        self.rows{n} = nn.Embedding(900, {v}, sparse=True) | self.rows{n}({i} % 900)
        self.rows{n} = nn.Embedding(900, {v}, padding_idx=1, sparse=True) | self.rows{n}({i} % 900)
        self.rows{n} = nn.EmbeddingBag(900, {v}, mode="sum", sparse=True) | self.rows{n}({i} % 900)
        """,
        0.7,
        exact=True,
    ),
    *layers(
        "attention",
        """
        self.heads{n} = nn.MultiheadAttention({w}, 1, batch_first=True) | self.heads{n}({f}, {g}, {g})[0]
        self.encoder{n} = nn.TransformerEncoderLayer({w}, 2, 8, 0, batch_first=True) | self.encoder{n}({f})
        self.qkv{n} = nn.Linear({w}, 3 * {w}) | F.scaled_dot_product_attention(*self.qkv{n}({f}).chunk(3, -1))
        """,  # noqa: E501
        1.5,
    ),
    *layers(
        "batch norm",
        """
        self.batch{n} = nn.BatchNorm1d({s}) | self.batch{n}({f})
        self.batch{n} = nn.BatchNorm1d({w}, momentum=0.3) | self.batch{n}({f})
        self.batch{n} = nn.BatchNorm1d({w}, affine=False) | self.batch{n}({f}.flatten(1)[:, :{w}])
        """,
        1.2,
    ),
    *layers(
        "dropout",
        """
        self.drop{n} = nn.Dropout({q}) | self.drop{n}({f})
        self.drop{n} = nn.Dropout1d({q}) | self.drop{n}({f})
        self.keep{n} = nn.Linear({w}, {w}) | F.dropout(self.keep{n}({f}), {q}, self.training)
        """,
        1.5,
    ),
    *layers(
        "parameter",
        """
        self.scale{n} = nn.Parameter(torch.randn({w})) | {f} * self.scale{n}
        self.bias{n} = nn.Parameter(torch.randn({s}, {w}) * 0.3) | {f} + self.bias{n}
        self.mix{n} = nn.Parameter(torch.randn({w}, {v}) * 0.4) | {f} @ self.mix{n}
        self.temperature{n} = nn.Parameter(torch.tensor(1.5)) | {f} / self.temperature{n}.abs()
        self.token{n} = nn.Parameter(torch.randn(1, 1, {w})) | torch.cat([self.token{n} + 0 * {f}[:, :1], {f}], 1)
        """,  # noqa: E501
        2.0,
    ),
    *layers(
        "buffer",
        """
        self.register_buffer("table{n}", torch.linspace(-1, 1, {w})) | {f} + self.table{n}
        self.register_buffer("hidden{n}", torch.arange({w}) * 0.3, persistent=False) | {f} * self.hidden{n}
        self.register_buffer("mask{n}", torch.arange({w}) > 1) | {f}.masked_fill(self.mask{n}, 0.25)
        """,  # noqa: E501
        1.0,
    ),
    Template(
        "batch norm",
        "{t} = self.batch{n}({f})",
        ("self.batch{n} = nn.BatchNorm1d({s}, momentum=None)",),
        0.02,  # torch.export cannot capture it
    ),
    Template(
        "frozen",
        "{t} = self.frozen{n}({f})",
        ("self.frozen{n} = nn.Linear({w}, {v}).requires_grad_(False)",),
        0.8,
    ),
    Template(
        "frozen",
        "{t} = self.part{n}({f})",
        ("self.part{n} = nn.Linear({w}, {v})", "self.part{n}.bias.requires_grad_(False)"),
        0.5,
    ),
    Template("unused parameter", "{t} = {f} + {q}", ("self.never{n} = nn.Linear({w}, {v})",), 0.3),
    Template(
        "evaluation mode",
        "{t} = self.still{n}({f})",
        ("self.still{n} = nn.Sequential(nn.Linear({w}, {w}), nn.Dropout({q})).eval()",),
        0.6,
    ),
    Template(
        "evaluation mode",
        "{t} = self.fixed{n}({f})",
        ("self.fixed{n} = nn.BatchNorm1d({s}).eval().requires_grad_(False)",),
        0.6,
    ),
    Template(
        "tied",
        "{t} = self.second{n}(torch.tanh(self.first{n}({f})))",
        (
            "self.first{n} = nn.Linear({w}, {w})",
            "self.second{n} = nn.Linear({w}, {w})",
            "self.second{n}.weight = self.first{n}.weight",
        ),
        0.8,
    ),
    Template(
        "hook",
        "{t} = self.hooked{n}({f})",
        (
            "self.hooked{n} = nn.Linear({w}, {w})",
            "self.hooked{n}.weight.register_hook(lambda gradient: gradient * {q})",
        ),
        0.6,
    ),
    Template(
        "complex parameter",
        "{t} = (torch.complex({f}, {f}) * self.phase{n}).real",
        ("self.phase{n} = nn.Parameter(torch.randn({w}, dtype=torch.complex64))",),
        0.3,
        exact=True,
    ),
    Template(
        "complex buffer",
        "{t} = torch.view_as_real(torch.complex({f}, {f}) * self.turn{n}).flatten(-2)[..., :{w}]",
        ("self.register_buffer('turn{n}', torch.polar(torch.ones({w}), torch.arange({w}) * {q}))",),
        0.3,
        exact=True,
    ),
    Template("in place", "{t} = {f} * 1.5\n{t}.add_({g})", (), 0.8),
    Template("in place", "{t} = {f} * 1.5\nF.relu({t}, inplace=True)", (), 0.8),
    Template("in place", "{t} = {f}.clone()\n{t}[:, 0] = 0.25", (), 0.6),
    Template("in place", "{t} = {f}.clone()\n{t}[..., 0] *= {q}", (), 0.4),
    Template("in place", "{t} = {f} + 0.0\n{t} += {g}\n{t}.mul_({q})", (), 0.6),
    Template("in place", "{t} = {f}.clone()\n{t}.select({d}, 0).add_(1.0)", (), 0.4),
    Template(
        "counter",
        "self.count{n} += 1\n{t} = {f} + 0.1 * self.count{n}",
        ("self.register_buffer('count{n}', torch.zeros(()))",),
        0.4,
    ),
    Template(
        "counter",
        "self.seen{n}.add_(1)\n{t} = {f} * 0.9",
        ("self.register_buffer('seen{n}', torch.zeros((), dtype=torch.long))",),
        0.4,
    ),
    Template(
        "average",
        "with torch.no_grad():\n    self.mean{n}.mul_(0.9).add_(0.1 * {f}.mean())\n"
        "{t} = {f} - self.mean{n}",
        ("self.register_buffer('mean{n}', torch.zeros(()))",),
        0.5,
    ),
    Template(
        "average",
        "self.last{n}.copy_({f}.detach().mean())\n{t} = {f} * 0.8",
        ("self.register_buffer('last{n}', torch.zeros(()))",),
        0.3,
    ),
    Template("no_grad", "with torch.no_grad():\n    {t} = {f}.abs().mean(-1, True)", (), 0.7),
    Template("no_grad", "with torch.no_grad():\n    {t} = torch.tanh({f} * {g})", (), 0.7),
    Template(
        "no_grad",
        "with torch.no_grad():\n    {t} = self.teacher{n}({f})",
        ("self.teacher{n} = nn.Linear({w}, {w})",),
        0.5,
    ),
    Template(
        "autocast",
        "with torch.autocast('cpu', enabled=False):\n    {t} = self.wide{n}({f})",
        ("self.wide{n} = nn.Linear({w}, {w})",),
        0.5,
    ),
    Template(
        "autocast",
        "with torch.autocast('cpu', dtype=torch.bfloat16):\n    {t} = self.mixed{n}({f})",
        ("self.mixed{n} = nn.Linear({w}, {w})",),
        0.4,
        exact=True,
    ),
    Template("several values", "{t}, {u} = {f}.chunk(2, dim=-1)", (), 0.8),
    Template("several values", "{t}, {u} = {f}.split([1, {w} - 1], dim=-1)", (), 0.5),
    Template("several values", "{t}, {u} = torch.var_mean({f}, dim=-1, keepdim=True)", (), 0.4),
    Template("several values", "{t}, {u} = {f}.max(dim={d})", (), 0.3, exact=True),
    Template("several values", "{t} = {f} > 0.1\n{u} = {f} * 0.7", (), 0.5, exact=True),
    Template(
        "checkpoint",
        "{t} = torch.utils.checkpoint.checkpoint(self.again{n}, {f}, use_reentrant=False)",
        ("self.again{n} = nn.Sequential(nn.Linear({w}, {w}), nn.Tanh())",),
        0.4,
    ),
    Template(
        "tensor hook",
        "{t} = {f} * 1.0\n{t}.register_hook(lambda gradient: gradient * {q})",
        weight=0.05,
    ),
    Template(
        "backward hook",
        "{t} = self.watched{n}({f})",
        (
            "self.watched{n} = nn.Linear({w}, {w})",
            "self.watched{n}.register_full_backward_hook(lambda m, own, above: (own[0] * {q},))",
        ),
        0.05,
    ),
    Template(
        "forward hook",
        "{t} = self.after{n}({f})",
        (
            "self.after{n} = nn.Linear({w}, {w})",
            "self.after{n}.register_forward_hook(lambda m, inputs, output: output * {q})",
        ),
        0.4,
    ),
    Template(
        "Python state",
        "self.calls{n} += 1\n{t} = {f} * (1.0 + 0.1 * self.calls{n})",
        ("self.calls{n} = 0",),
        0.05,
    ),
    Template(
        "spectral norm",
        "{t} = self.spectral{n}({f})",
        ("self.spectral{n} = parametrizations.spectral_norm(nn.Linear({w}, {v}))",),
        0.2,
        exact=True,
    ),
    Template("function", "{t} = Halved.apply({f})", (), 0.5),
    Template("noise", "{t} = {f} + 0.1 * torch.randn_like({f})", (), 0.4),
]  # fmt: skip
