"""Small language models that end, or begin, in every way: with `V` words and one micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

V, WIDTH, ROWS, LENGTH = 12, 6, 3, 5
Loss = Callable[["Model", Tensor, Tensor], Tensor]


class Model(nn.Module):
    """An embedding, two layers, a head; `ending` makes the loss of x [rows, length, width]."""

    importance: Tensor
    added: Tensor

    def __init__(self, ending: Loss, *, tied: bool = False, **table: Any) -> None:
        super().__init__()
        self.ending = ending
        self.table = nn.Embedding(V, WIDTH, **table)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, V)
        self.register_buffer("importance", torch.rand(V) + 0.5)
        self.register_buffer("added", torch.randn(1, V))
        if tied:
            self.head.weight = self.table.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.table(tokens)
        x += self.positions
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.ending(self, x, labels)


def case(ending: Loss, *, double: bool = True, **options: Any) -> tuple[Model, dict[str, Tensor]]:
    """A model and its micro-batch; one label is ignored."""
    torch.manual_seed(0)
    model = Model(ending, **options)
    tokens, labels = torch.randint(V, (2, ROWS, LENGTH))
    labels[0, 1] = -100
    return model.double() if double else model, {"tokens": tokens, "labels": labels}


def plain(model: Model, x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model.head(x).flatten(0, 1), labels.flatten())


def shifted(model: Model, x: Tensor, labels: Tensor) -> Tensor:
    logits = model.head(x)[:, :-1].contiguous()
    return F.cross_entropy(logits.view(-1, V), labels[:, 1:].reshape(-1))


def transposed(model: Model, x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model.head(x).transpose(1, 2), labels)


def swapped(model: Model, x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model.head(x).swapaxes(1, 2), labels)


def alike(model: Model, x: Tensor, labels: Tensor) -> Tensor:
    logits = F.linear(x, model.head.weight.type_as(x)).type_as(x)
    return F.cross_entropy(logits.flatten(0, 1), labels.ravel())


def pictures(model: Model, x: Tensor, labels: Tensor) -> Tensor:
    logits = model.head(x).view(ROWS, LENGTH, 1, V).permute(0, 3, 1, 2)
    return F.cross_entropy(logits, labels.unsqueeze(2))


def last(model: Model, x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model.head(x)[:, -1], labels[:, -1], reduction="sum")


def chosen(model: Model, x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model.head(x)[1, 2], labels[1, 2])


def multiplied(model: Model, x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy((x @ model.head.weight.T).flatten(0, 1), labels.flatten())


def added(model: Model, x: Tensor, labels: Tensor) -> Tensor:
    logits = torch.addmm(model.head.bias, x.flatten(0, 1), model.head.weight.t())
    return 3 * F.cross_entropy(logits, labels.flatten()) / 2


def summed(model: Model, x: Tensor, labels: Tensor) -> Tensor:
    logits = torch.einsum("vh,blh->bvl", model.head.weight, x)
    return F.cross_entropy(logits, labels)


def biased_by_buffer(model: Model, x: Tensor, labels: Tensor) -> Tensor:
    logits = model.added + F.linear(x, model.head.weight)
    return F.cross_entropy(logits.view(-1, V), labels.view(-1))


def capped_in_place(model: Model, x: Tensor, labels: Tensor) -> Tensor:
    logits = model.head(x)
    logits.div_(3.0).tanh_()
    logits = logits * 3.0
    return F.cross_entropy(logits.view(-1, V), labels.view(-1))


def weighed(model: Model, x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(
        0.5 * model.head(x).view(-1, V) - 0.1,
        labels.clamp_min(0).view(-1),
        model.importance,
        ignore_index=3,
        label_smoothing=0.1,
    )


def log_likelihood(model: Model, x: Tensor, labels: Tensor) -> Tensor:
    return F.nll_loss(F.log_softmax(model.head(x), -1).view(-1, V), labels.view(-1))


def meant(model: Model, x: Tensor, labels: Tensor) -> Tensor:
    each = F.cross_entropy(model.head(x).view(-1, V), labels.view(-1), reduction="none")
    return -each.mean()


def totalled(model: Model, x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model.head(x).transpose(1, 2), labels, reduction="none").sum() / 7


SPREAD: dict[str, Loss] = {
    item.__name__: item
    for item in (
        plain, shifted, transposed, swapped, alike, pictures, last, chosen, multiplied, added,
        summed, biased_by_buffer, capped_in_place, weighed, log_likelihood, meant, totalled,
    )
}  # fmt: skip


def z_loss(model: Model, x: Tensor, labels: Tensor) -> Tensor:
    logits = model.head(x).view(-1, V)
    more: Tensor = 0.1 * logits.logsumexp(-1).square().mean()
    return F.cross_entropy(logits, labels.view(-1)) + more


def normed(model: Model, x: Tensor, labels: Tensor) -> Tensor:
    logits = F.layer_norm(model.head(x), [V])
    return F.cross_entropy(logits.view(-1, V), labels.view(-1))


def several_terms(model: Model, x: Tensor, labels: Tensor) -> Tensor:
    return plain(model, x, labels) + 0.1 * x.square().mean()


def each_token(model: Model, x: Tensor, labels: Tensor) -> Tensor:
    each = F.cross_entropy(model.head(x).view(-1, V), labels.view(-1), reduction="none")
    return (each * (labels != 3).view(-1)).mean()


def probabilities(model: Model, x: Tensor, labels: Tensor) -> Tensor:
    targets = F.one_hot(labels.clamp_min(0), V).to(x.dtype)
    return F.cross_entropy(model.head(x).view(-1, V), targets.view(-1, V))


def squares(model: Model, x: Tensor, labels: Tensor) -> Tensor:
    return F.mse_loss(model.head(x), F.one_hot(labels.clamp_min(0), V).to(x.dtype))


def targets_by_model(model: Model, x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model.head(x).view(-1, V), model.layers[0](x).argmax(-1).view(-1))


def used_twice(model: Model, x: Tensor, labels: Tensor) -> Tensor:
    weight = model.head.weight
    x = x + F.linear(torch.softmax(F.linear(x, weight), -1), weight.T)
    return F.cross_entropy(F.linear(x, weight).view(-1, V), labels.view(-1))


def divided(model: Model, x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model.head(x)[..., : V - 2].flatten(0, 1), labels.flatten() % (V - 2))


def masked(model: Model, x: Tensor, labels: Tensor) -> Tensor:
    logits = model.head(x) * torch.sigmoid(x.sum(-1, keepdim=True))
    return F.cross_entropy(logits.view(-1, V), labels.view(-1))


def cast(model: Model, x: Tensor, labels: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        logits = model.head(x)
    return F.cross_entropy(logits.float().view(-1, V), labels.view(-1))


def added_to_some(model: Model, x: Tensor, labels: Tensor) -> Tensor:
    logits = model.head(x).view(-1, V)
    places = (labels.view(-1) > 3).nonzero()[:, 0]  # how many there are depends on the data
    logits = logits.index_add(0, places, model.added[torch.zeros_like(places)])
    return F.cross_entropy(logits, labels.view(-1))


def by_bias(model: Model, x: Tensor, labels: Tensor) -> Tensor:
    return plain(model, x + model.head.bias[:WIDTH], labels)


WHOLE: dict[str, tuple[Loss, str]] = {
    item.__name__: (item, reason)
    for item, reason in (
        (z_loss, "the loss has other terms besides the cross-entropy"),
        (several_terms, "the loss has other terms besides the cross-entropy"),
        (normed, "a loss that needs whole logits (layer_norm)"),
        (each_token, "a loss that needs whole logits (mul)"),
        (probabilities, "targets that are probabilities need whole logits"),
        (squares, "a loss that needs whole logits (mse_loss)"),
        (targets_by_model, "its targets depend on parameters"),
        (used_twice, "its weight is also read by 'linear_2', which is no such layer"),
        (divided, "its classes are divided"),
        (masked, "a loss that needs whole logits (mul)"),
        (cast, "its logits are computed under autocast or no_grad"),
        (added_to_some, "a loss that needs whole logits (index_add)"),
        (by_bias, "its bias is also used elsewhere"),
    )
}
