"""Plain torch models, each with something that a division can get wrong, and one micro-batch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

ROWS, WIDTH, CLASSES = 4, 8, 5
Loss = Callable[[Any], torch.Tensor]


def rows(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(ROWS, *shape, generator=torch.Generator().manual_seed(seed))


def classes(high: int = CLASSES, *shape: int) -> torch.Tensor:
    return torch.randint(high, (ROWS, *shape), generator=torch.Generator().manual_seed(2))


class Stack(nn.Module):
    """Layers one after the other, a head and a cross-entropy; subclasses change the layer."""

    def __init__(self, layer: Callable[[], nn.Module] = lambda: nn.Linear(WIDTH, WIDTH)) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x), labels)


class SparseTables(Stack):
    """Rows of a table and of a bag of another, whose gradients are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, WIDTH, sparse=True)
        self.bag = nn.EmbeddingBag(30, WIDTH, mode="sum", sparse=True)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        bags = torch.stack([x, x + 5, x], dim=1)
        return super().forward(self.table(x) + self.bag(bags), labels)


class UNet(nn.Module):
    """Skips over all stages, and no numbered modules."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 4, 3, padding=1)
        self.down = nn.Conv2d(4, 8, 3, stride=2, padding=1)
        self.deep = nn.Conv2d(8, 8, 3, padding=1)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.leave = nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, image: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        shallow = F.relu(self.enter(image))
        half = F.relu(self.down(shallow))
        half = half + F.relu(self.deep(half))
        whole = torch.cat([self.up(half), shallow], dim=1)
        return F.mse_loss(self.leave(whole), target)


class TwoTowers(nn.Module):
    """Two towers that meet in a product; the loss is the caller's."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(20, WIDTH)
        self.items = nn.Embedding(30, WIDTH)
        self.user_tower = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, WIDTH))
        self.item_tower = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, WIDTH))

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = (
            self.user_tower(self.users(user)) @ self.item_tower(self.items(item)).T
        )
        return scores


class Nested(Stack):
    """Inputs in a tuple of dicts; the loss in a dict."""

    def forward(self, x: Any, labels: torch.Tensor) -> Any:
        first, more = x
        total = first["x"] + more[0]["y"]
        return {"loss": super().forward(total, labels), "x": total}


@dataclass
class Output:
    loss: torch.Tensor


class WithOutput(Stack):
    """The loss as an attribute."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        return Output(super().forward(x, labels))


class Shared(Stack):
    """One layer, used on every stage."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.layers = nn.ModuleList([block])

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for _ in range(8):
            x = self.layers[0](x)
        return F.cross_entropy(self.head(x), labels)


class TiedThrice(nn.Module):
    """One table as embedding, in the middle and as head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.middle = nn.Linear(WIDTH, 16, bias=False)
        self.head = nn.Linear(WIDTH, 16, bias=False)
        self.middle.weight = self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index == 1:
                x = x + F.linear(torch.softmax(self.middle(x), dim=-1), self.middle.weight.T)
        return F.cross_entropy(self.head(x), labels)


class Normed(nn.Module):
    """BatchNorm: buffers that the forward updates."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.norm(self.linear(x)))


class NormedTwice(Stack):
    """One BatchNorm behind two layers: its statistics have one home."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x)
            x = self.norm(x) if index < 2 else x
        return F.cross_entropy(self.head(x), labels)


class Choices(Stack):
    """Integers and truth values that parameters decide are used by the last layer."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        best, positive = x.argmax(dim=-1), x > 0
        values, places = x.topk(2, dim=-1)
        for layer in list(self.layers)[1:]:
            x = layer(x)
        x = torch.where(positive, x, 0.5 * x) + values.sum(-1, keepdim=True)
        x = x + F.one_hot(best, WIDTH).to(x.dtype) + x.gather(1, places).mean(-1, keepdim=True)
        return F.cross_entropy(self.head(x), labels)


class Parts(Stack):
    """The parts of one split are used by other layers."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        left, right = self.layers[0](x).split([3, 5], dim=-1)
        y = self.layers[1](torch.cat([right, left], dim=-1))
        y = self.layers[2](y) + torch.cat([left, left, right[:, :2]], dim=-1)
        return F.cross_entropy(self.head(self.layers[3](y)), labels)


class InPlace(Stack):
    """Values updated in place after another layer has read them."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        y = self.layers[1](x)
        y += x
        x = self.layers[2](y)
        x[:, 0] = y[:, 1] * 2
        x.relu_()
        labels[labels == 4] = 0
        return F.cross_entropy(self.head(self.layers[3](x) + x), labels)


class Turning(nn.Module):
    """Takes and returns values in another order of memory, in which dropout draws."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(x, 0.2).transpose(1, 2)
        y: torch.Tensor = self.linear(x.view(-1, WIDTH))
        return y.view(x.shape).transpose(1, 2)


class Normalised(Stack):
    """A batch that is updated in place, and read through views afterwards, in several blocks; and
    so is a value with a gradient."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x.sub_(x.mean(0)).div_(x.std(0) + 1)
        y = self.layers[0](x.view(-1, WIDTH))
        F.relu(y, inplace=True)
        y = self.layers[1](y.view(-1, WIDTH)) + x[:, :]
        y = self.layers[3](self.layers[2](y) + x) + y.flatten(1)
        labels.clamp_(max=CLASSES - 1)
        return F.cross_entropy(self.head(y), labels) + F.cross_entropy(y, labels)


class Strided(Stack):
    """Values of which only the transposed can be viewed cross stages."""

    def __init__(self) -> None:
        super().__init__(Turning)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = x.transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x.transpose(1, 2).mean(1)), labels)


class Complex(Stack):
    """Complex values cross stages, with gradients."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        turned = torch.view_as_complex(x.reshape(ROWS, -1, 2)) * torch.polar(
            torch.ones(4), torch.arange(4) / 4
        )
        x = self.layers[1](x)
        x = self.layers[2](x) + torch.view_as_real(turned).flatten(1)
        return F.cross_entropy(self.head(self.layers[3](x)), labels)


class Random(nn.Module):
    """Stochastic depth, noise and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.dropout(self.linear(x), 0.3, self.training) + 0.1 * torch.randn_like(x)
        keep = torch.rand(x.shape[0], 1).add_(0.8).floor_()
        return x + y * keep


class Branching(nn.Module):
    """A layer that computes in training what an evaluation does not, one way of `WAYS`."""

    average: torch.Tensor

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.first, self.second = way, nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.after = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("average", torch.ones(WIDTH))
        if way == "spectral norm":
            nn.utils.parametrizations.spectral_norm(self.first)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor
        drawn = torch.rand(x.shape[0], 1) if self.way == "depth" and self.training else None
        if self.way == "noise in place" and self.training:
            x = x.clone()
            x += 0.1 * torch.randn_like(x)
        if self.way == "average" and self.training:
            with torch.no_grad():
                self.average.mul_(0.9).add_(x.mean(0), alpha=0.1)
        if self.way == "weights":
            weight = self.first.weight
            weight = weight + 0.01 * torch.randn_like(weight) if self.training else weight
            y = self.second(F.gelu(F.linear(x, weight, self.first.bias)))
        else:
            y = self.second(F.gelu(self.first(x - self.average)))
        if self.way == "other layer" and not self.training:
            y = self.after(y) + y
        if self.way == "numbers":  # the first dropout is of no use in training
            y = F.dropout(y, 0.5, self.training)
            y = F.dropout(x) if self.training else y
        if self.way == "gumbel":
            y = F.gumbel_softmax(y, dim=-1) if self.training else y.softmax(-1)
        if self.way == "depth":
            y = y if drawn is None else y * drawn.add_(0.8).floor_() / 0.8
            y += x
            y.clamp_(-2.0, 2.0)
        if self.way == "numbers":
            scale = torch.tensor(2.0 if self.training else 3.0)
            y = y * scale + (torch.tensor(0.1) * torch.randn_like(y) if self.training else 0.0)
        return y + x


WAYS = (
    *("depth", "noise in place", "average", "weights"),
    *("other layer", "gumbel", "spectral norm", "numbers"),
)


class Branches(Stack):
    """Layers, and a loss, that branch on `self.training`."""

    count: torch.Tensor

    def __init__(self) -> None:
        ways = iter(WAYS)
        super().__init__(lambda: nn.Sequential(*(Branching(next(ways)) for _ in range(2))))
        self.register_buffer("count", torch.ones(()))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.count.add_(1)
        loss = super().forward(x, labels) / self.count
        return loss + 0.1 * self.head.weight.square().mean() if self.training else loss


class Clipped(torch.autograd.Function):
    """The identity, with a gradient that is the user's own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, limit: float) -> torch.Tensor:
        ctx.limit = limit
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0].clamp(-ctx.limit, ctx.limit), None


class Custom(nn.Module):
    """A layer with a custom autograd Function."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        clipped: torch.Tensor = Clipped.apply(self.linear(x), 0.01)  # type: ignore[no-untyped-call]
        return clipped


class Counting(Stack):
    """Buffers that the forward updates and reads, one through a view."""

    calls: torch.Tensor
    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("seen", torch.zeros(2, WIDTH))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.layers[1](self.layers[0](x)) / self.calls
        self.seen[0].lerp_(x.detach().mean(0), 0.5)
        x = self.layers[3](self.layers[2](x)) + self.seen[0]
        return F.cross_entropy(self.head(x), labels)


class Remembering(Stack):
    """A forward that assigns attributes."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            self.last = x
        self.count = getattr(self, "count", 0) + 1
        return F.cross_entropy(self.head(self.last), labels)


class Bare(Stack):
    """No parameters in the first layers, and one that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Flatten(), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
        )
        self.unused = nn.Parameter(torch.ones(3))


class Constants(Stack):
    """Numbers that become tensors in the forward, and masks written in place."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(ROWS, WIDTH)
        mask[:, ::2] = 1.0
        early = mask * 0.5
        mask[:, 1] += 0.25
        for layer in self.layers:
            x = layer(x) * torch.tensor(0.7) + mask * (torch.arange(WIDTH) / 3) + early
        return F.cross_entropy(self.head(x), labels)


def hostile() -> nn.Module:
    """Names that would do harm if they were taken for code."""
    model = Stack()
    model.layers = nn.ModuleList()
    for name in ('x"; import os', "class", "self", "\n#", "Ä ö"):
        model.layers.add_module(name, nn.Linear(WIDTH, WIDTH))
    return model


def frozen() -> nn.Module:
    """Every second layer frozen."""
    model = Stack()
    for layer in list(model.layers)[::2]:
        layer.requires_grad_(False)
    return model


def squared(outputs: torch.Tensor) -> torch.Tensor:
    """A loss of the caller."""
    return outputs.square().mean()


XY = {"x": rows(WIDTH), "labels": classes()}
IMAGES = {"image": rows(3, 8, 8), "target": rows(3, 8, 8, seed=3)}
TOKENS = {"tokens": classes(16, 6), "labels": classes(16)}
NESTED = {"x": ({"x": rows(WIDTH)}, [{"y": rows(WIDTH, seed=4)}]), "labels": classes()}

MODELS: dict[str, tuple[Callable[[], nn.Module], Any, Loss | None]] = {
    "U-Net": (UNet, IMAGES, None),
    "two towers, positional, loss": (TwoTowers, (classes(20), classes(30)), squared),
    "nested inputs": (Nested, NESTED, None),
    "loss attribute": (WithOutput, XY, None),
    "shared by all stages": (Shared, XY, None),
    "batch norm": (lambda: Stack(Normed), XY, None),
    "batch norm twice": (NormedTwice, XY, None),
    "integers and truth values": (Choices, XY, None),
    "parts of a split": (Parts, XY, None),
    "in place": (InPlace, XY, None),
    "in place, then views": (Normalised, XY, None),
    "strided, dropout": (Strided, {"x": rows(6, WIDTH), "labels": classes()}, None),
    "complex": (Complex, XY, None),
    "random": (lambda: Stack(Random), XY, None),
    "branches": (Branches, XY, None),
    "autograd function": (lambda: Stack(Custom), XY, None),
    "buffers": (Counting, XY, None),
    "assigns attributes": (Remembering, XY, None),
    "bare layers": (Bare, XY, None),
    "constants": (Constants, XY, None),
    "hostile names": (hostile, XY, None),
    "frozen": (frozen, XY, None),
}
