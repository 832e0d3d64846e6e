"""Factories that the tests name on the command line."""

from collections.abc import Callable

import torch

from parcompiler.models import gpt


def make() -> tuple[gpt.GPT, tuple[torch.Tensor, torch.Tensor]]:
    """A GPT of two layers, which says so on standard output."""
    print("printed by the factory")
    config = gpt.Config(layers=2, heads=2, hidden=8, vocabulary=16, sequence=4, tied=False)
    tokens = torch.zeros(2, 4, dtype=torch.long)
    torch.manual_seed(0)
    return gpt.GPT(config), (tokens, tokens)


def evaluating() -> tuple[gpt.GPT, tuple[torch.Tensor, torch.Tensor]]:
    """The same in evaluation mode, as what loads a checkpoint may leave it."""
    model, inputs = make()
    return model.eval(), inputs


def empty() -> None:
    """No model."""


def failing() -> None:
    """A factory with a mistake in it."""
    message = "no such size"
    raise ValueError(message)


def loose() -> tuple[gpt.GPT, torch.Tensor]:
    """Inputs that are neither a dict nor a tuple."""
    model, (tokens, _) = make()
    return model, tokens


Labelled = tuple[torch.nn.Module, tuple[torch.Tensor]]


def lossless() -> tuple[*Labelled, Callable[[torch.Tensor], torch.Tensor]]:
    """A model whose outputs are no loss, with a function of them that is."""
    return *unreduced()[:2], torch.mean


def unreduced() -> tuple[*Labelled, str]:
    """The same with the name of a loss in its place."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    return model, (torch.zeros(2, 4),), "mean"


class Unruly(torch.nn.Module):
    """A model whose control flow depends on values: it cannot be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A branch on data."""
        y: torch.Tensor = self.linear(x)
        return y.sum() if y.sum() > 0 else -y.sum()


def unruly() -> tuple[Unruly, tuple[torch.Tensor]]:
    """The model that cannot be captured."""
    return Unruly(), (torch.zeros(2, 2),)


MODEL = gpt


def larger() -> tuple[gpt.GPT, tuple[torch.Tensor, torch.Tensor]]:
    """Another model, on as many samples."""
    config = gpt.Config(layers=2, heads=2, hidden=12, vocabulary=16, sequence=4, tied=False)
    return gpt.GPT(config), make()[1]


def wordy() -> tuple[gpt.GPT, tuple[torch.Tensor, torch.Tensor]]:
    """A model with tokens enough for a tokenizer made of a text."""
    config = gpt.Config(layers=2, heads=2, hidden=8, vocabulary=300, sequence=4, tied=False)
    return gpt.GPT(config), make()[1]
