"""Complex parameters and buffers: a program with them computes what the model computes."""

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parcompiler as pc
from parcompiler.runtime.tensor_files import read
from parcompiler.verification.batches import random_batch
from parcompiler.verification.pool import Job, pool
from tests.distributed import recipe


class Attention(nn.Module):
    """Attention with the rotary positions of torchtitan's Llama: a table of complex numbers."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm, self.qkv = nn.RMSNorm(hidden), nn.Linear(hidden, 3 * hidden, bias=False)

    def forward(self, x: Tensor, freqs_cis: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        q, k = self._turn(q, freqs_cis), self._turn(k, freqs_cis)
        heads = q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1)
        y = F.scaled_dot_product_attention(*heads, is_causal=True)
        return x + y.squeeze(1)

    @staticmethod
    def _turn(x: Tensor, freqs_cis: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * freqs_cis).flatten(-2).type_as(x)


class Llama(nn.Module):
    def __init__(self, hidden: int = 8, length: int = 6) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(32, hidden)
        self.layers = nn.ModuleList(Attention(hidden) for _ in range(2))
        self.output = nn.Linear(hidden, 32, bias=False)
        angles = torch.outer(torch.arange(length), 0.1 ** torch.arange(hidden // 2))
        freqs_cis = torch.polar(torch.ones_like(angles), angles)
        self.register_buffer("freqs_cis", freqs_cis, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, self.freqs_cis)
        return F.cross_entropy(self.output(x).flatten(0, 1), tokens.flatten())


class Spectral(nn.Module):
    """A layer of a Fourier neural operator."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width, 5, dtype=torch.complex64) / width)
        self.skip = nn.Conv1d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        modes = torch.einsum("bix,iox->box", torch.fft.rfft(x), self.weight.conj())
        return F.gelu(torch.fft.irfft(modes, n=x.shape[-1]) + self.skip(x))


class Operator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Conv1d(1, 4, 1)
        self.layers = nn.ModuleList([Spectral(4), Spectral(4)])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.lift(x)
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(x.mean(1, keepdim=True), y)


class Turn(nn.Module):
    """Returns a complex value, and a real one, whose signs torch leaves to readers of memory."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.randn(8, dtype=torch.complex64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        turned = (torch.complex(x, x) * self.phase.conj()).conj()
        return turned, turned.mean().conj().imag


class End(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, turned: Tensor, mean: Tensor) -> Tensor:
        predicted: Tensor = self.linear(turned.real * mean + turned.imag)
        return predicted


class Turning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Turn(), End()])

    def forward(self, x: Tensor) -> Tensor:
        turn, end = self.layers
        predicted: Tensor = end(*turn(x))
        return predicted.square().mean()


def llama() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Llama(), {"tokens": torch.randint(32, (2, 6))}


def operator() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Operator(), {"x": torch.randn(2, 1, 8), "y": torch.randn(2, 1, 8)}


def turning() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Turning(), {"x": torch.randn(2, 8)}


@pytest.mark.parametrize(
    ("make", "mesh", "options"),
    [
        (llama, pc.Mesh(pipeline=2), {}),
        (turning, pc.Mesh(pipeline=2, data=2), {}),
        (operator, pc.Mesh(data=2), {"precision": "bf16"}),
        (operator, pc.Mesh(tensor=2), {"sharding": {"layers.*.weight": "S(1)"}}),
    ],
    ids=["rotary table", "signs left to readers", "sums in 16 bits", "pieces"],
)
def test_complex_tensors_are_exact_on_every_axis(make, mesh, options) -> None:  # type: ignore[no-untyped-def]
    model, inputs = make()
    verification = pc.compile(model, mesh, inputs, microbatches=2, **options).verify()
    assert verification.ok, verification
    assert verification.lifted is not None


@pytest.mark.parametrize("precision", [None, "fp64"])
def test_an_export_holds_complex_weights(tmp_path: Path, precision: str | None) -> None:
    model, inputs = operator()
    program = pc.compile(model, pc.Mesh(), inputs, microbatches=2, precision=precision)
    weights = dict(read(program.export(tmp_path / "out") / "weights" / "stage_0.safetensors"))
    wanted = model.get_parameter("layers.0.weight")
    assert (
        weights["layers.0.weight"].dtype == program.problem.graph.by_name["layers.0.weight"].dtype
    )
    assert torch.equal(weights["layers.0.weight"].to(wanted.dtype), wanted)


def test_complex_gradients_are_clipped_and_averaged_as_in_one_process(tmp_path: Path) -> None:
    model, inputs = operator()
    program = pc.compile(model, pc.Mesh(data=2), inputs, microbatches=1)
    batches = [random_batch(program.problem.graph, 2, seed) for seed in range(2)]
    path, options = program.export(tmp_path / "out"), {"lr": 0.1}
    job = Job(str(path), batches, optimizer="AdamW", options=options, max_norm=0.1)
    outcome = pool().run(job, 2)
    twin = copy.deepcopy(model)
    wanted = recipe.train(twin, batches, 2, None, max_norm=0.1, lr=0.1, kind=torch.optim.AdamW)
    assert outcome.norms is not None
    torch.testing.assert_close(outcome.norms, torch.tensor(wanted.norms, dtype=torch.float64))
    assert min(wanted.norms) > 0.1, "nothing is clipped"
    for name, parameter in twin.named_parameters():
        torch.testing.assert_close(outcome.state[name], parameter.detach(), rtol=1e-4, atol=1e-6)
