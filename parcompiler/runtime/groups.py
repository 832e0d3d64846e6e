"""Parameter groups of an optimizer, by the names of the model's parameters.

    groups=[("*.bias", {"weight_decay": 0.0}), ("head.*", {"lr": 1e-4})]

    group 0   parameters that no pattern matches        the optimizer's own options
    group 1   biases, but for that of the head          weight_decay 0.0
    group 2   the head: the last that matches decides   lr 1e-4

Every rank has all groups in one order, empty where it holds none of their parameters: so
learning-rate schedulers count the same groups everywhere.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from parcompiler.errors import InputError, shown

TRIED = 20  # steps: Prodigy and its like move slowly from their first estimate
LARGE = 1e4  # of gradients: above any limit on their norm

Patterns = Sequence[tuple[str, Mapping[str, Any]]]
GroupOf = Callable[[str, nn.Parameter], Mapping[str, Any]]


def check_kind(kind: object) -> None:
    """Raise InputError unless `kind` makes an optimizer that a worker can step."""
    if isinstance(kind, torch.optim.Optimizer):
        name = type(kind).__name__
        message = (
            f"set_optimizer builds the optimizer over this rank's parameters: give the class and "
            f"its options, as in set_optimizer(torch.optim.{name}, lr=...) (an instance of {name} "
            "was given)"
        )
        raise InputError(message)
    if not callable(kind):
        message = f"an optimizer's class is needed, as torch.optim.AdamW ({kind!r} given)"
        raise InputError(message)
    if getattr(kind, "func", kind) is torch.optim.LBFGS:
        message = (
            "LBFGS runs the model several times in a step, by a closure, which a worker does not: "
            "take an optimizer that steps by one gradient, as torch.optim.AdamW"
        )
        raise InputError(message)
    if getattr(kind, "func", kind) is torch.optim.SparseAdam:
        message = (
            "SparseAdam steps tables alone, by the rows that a step looked up, and a worker has "
            "one optimizer for all parameters: take torch.optim.SGD, Adagrad or Adam"
        )
        raise InputError(message)


def check_takes_rows(kind: object, tables: Sequence[str], options: Mapping[str, Any]) -> None:
    """Raise InputError for an optimizer of torch that changes rows without a gradient too."""
    kind = getattr(kind, "func", kind)
    name = getattr(kind, "__name__", "")
    fault = f"{name} changes" if getattr(torch.optim, name, None) is kind else ""
    if name in ("Adagrad", "SGD"):
        fault = "weight_decay changes" if options.get("weight_decay") else ""
        if options.get("fused"):
            message = (
                f"torch's fused {name} takes no gradients of rows ({tables[0]!r}): leave fused out"
            )
            raise InputError(message)
    if fault:
        message = (
            f"{fault} rows that a step did not look up, and with sparse=True gradients of "
            f"{len(tables)} tables ({tables[0]!r}) have only the rows that it did: take "
            "torch.optim.SGD or Adagrad without weight_decay, or compile with the optimizer that "
            'you use, as optimizer="adamw"'
        )
        raise InputError(message)


def is_coupling(kind: Callable[..., torch.optim.Optimizer], options: Mapping[str, Any]) -> bool:
    """Whether an optimizer couples its parameters, as Prodigy does: stepping two together gives
    other values than stepping each alone. False where it cannot be tried, or draws random
    numbers."""

    def stepped(*sizes: float) -> list[torch.Tensor]:
        weights = [nn.Parameter(torch.ones(4, 4, dtype=torch.float64)) for _ in sizes]
        optimizer = kind([{"params": weights}], **options)  # in groups, as a worker gives them
        for _ in range(TRIED):
            for weight, size in zip(weights, sizes, strict=True):
                weight.grad = torch.full_like(weight, size)
            optimizer.step()
        return [weight.detach() for weight in weights]

    if getattr(torch.optim, getattr(kind, "__name__", ""), None) is kind:
        return False
    with torch.random.fork_rng(devices=[]):
        try:
            together, again = stepped(1.0, LARGE), stepped(1.0, LARGE)
            apart = [*stepped(1.0), *stepped(LARGE)]
        except Exception:  # whatever a user's optimizer raises
            return False
    draws = not all(map(torch.equal, together, again))
    alike = all(
        torch.allclose(a, b, rtol=1e-9, atol=0.0) for a, b in zip(together, apart, strict=True)
    )
    return not draws and not alike


class Groups:
    """Which parameters of this rank are in which group: `options` of each group, and the `number`
    of the group of each parameter."""

    def __init__(
        self,
        wanted: Patterns | GroupOf | None,
        parameters: Mapping[str, nn.Parameter],
        gather: Callable[[Any], list[Any]],
    ) -> None:
        """`parameters` are the trained ones, whole or pieces. `gather` returns the values of all
        ranks. Raises InputError for groups of another form, and on every rank where no parameter of
        the model matches a pattern."""
        self.options: list[Mapping[str, Any]] = [{}]
        self.number = dict.fromkeys(parameters, 0)
        if wanted is None:
            return
        if callable(wanted):
            self._by_function(wanted, parameters, gather)
        else:
            self._by_patterns(wanted, gather)

    def made(self, trained: Mapping[str, nn.Parameter]) -> list[dict[str, Any]]:
        """The groups in the form that optimizers take, with the parameters or masters that they
        change."""
        groups: list[dict[str, Any]] = [{"params": [], **options} for options in self.options]
        for name, parameter in trained.items():
            groups[self.number[name]]["params"].append(parameter)
        if not any(group["params"] for group in groups):  # torch refuses to have none
            groups[0]["params"] = [torch.zeros(0, 0)]  # Muon takes matrices alone
        return groups

    def _by_patterns(self, patterns: Patterns, gather: Callable[[Any], list[Any]]) -> None:
        pairs = [_pair(item) for item in patterns]
        self.options += [options for _, options in pairs]
        matched: set[int] = set()
        for name in self.number:
            for k, (pattern, _) in enumerate(pairs, start=1):
                if fnmatch.fnmatchcase(name, pattern):
                    self.number[name] = k
                    matched.add(k)
        matched.update(*gather([*matched]))
        unmatched = [pattern for k, (pattern, _) in enumerate(pairs, start=1) if k not in matched]
        if unmatched:
            message = (
                f"no trained parameter matches {', '.join(map(repr, unmatched))} of the groups "
                "(* stands for any letters): names are those of model.named_parameters()"
            )
            raise InputError(message)

    def _by_function(
        self,
        function: GroupOf,
        parameters: Mapping[str, nn.Parameter],
        gather: Callable[[Any], list[Any]],
    ) -> None:
        chosen = {name: _text(function(name, p), name) for name, p in parameters.items()}
        known = {"{}": 0}
        for text in sorted({*chain(*gather([*chosen.values()]))} - {"{}"}):
            known[text] = len(self.options)
            self.options.append(json.loads(text))
        self.number = {name: known[text] for name, text in chosen.items()}


def _pair(item: object) -> tuple[str, Mapping[str, Any]]:
    """A pattern and its options. Raises InputError for anything else."""
    match item:
        case (str(pattern), Mapping() as options) if "params" not in options:
            return pattern, options
    message = (
        "a group is a pattern of names and options, as ('*.bias', {'lr': 1e-4}) "
        f"({shown(item)} given)"
    )
    raise InputError(message)


def _text(options: object, name: str) -> str:
    """The options of a parameter as JSON. Raises InputError where they are not JSON-able."""
    try:
        if isinstance(options, Mapping) and "params" not in options:
            return json.dumps(dict(options), sort_keys=True)
    except TypeError:
        pass
    message = f"a function of groups returns options such as {{'lr': 1e-4}} ({name}: {options!r})"
    raise InputError(message)
