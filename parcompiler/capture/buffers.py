"""Values of non-persistent buffers of a model on the meta device, computed by its classes.

Buffers that are not persistent (the frequencies of rotary positions) are computed when a module is
made, and on the meta device they have no values. Many modules are a function of one configuration,
which they keep: the outermost such module around a buffer is made again on the CPU, with parameters
that stay on the meta device, and its buffer is used if it is the same each time and the modules
around it agree with the model's.

>>> class Table(nn.Module):
...     def __init__(self, config: dict[str, int]) -> None:
...         super().__init__()
...         self.config = config
...         self.register_buffer("table", torch.arange(config["size"]), persistent=False)
>>> with torch.device("meta"):
...     model = Table({"size": 3})
>>> computed(model, ["table"])
{'table': tensor([0, 1, 2])}
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from parcompiler.capture.patches import patched
from parcompiler.temporary import default_dtype

SIMPLE = (bool, int, float, complex, str, torch.dtype)


def computed(model: nn.Module, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Values for those of the buffers `names` that are on the meta device, by name; buffers that
    cannot be computed are left out."""
    buffers = dict(model.named_buffers())
    values: dict[str, torch.Tensor] = {}
    made_again = cache(lambda host, default: list(_made_again(model.get_submodule(host), default)))
    for name in names:
        buffer = buffers.get(name)
        if buffer is None or not buffer.is_meta:
            continue
        for host in ("", *accumulate(name.split(".")[:-1], "{}.{}".format)):
            # The model may have been made under another default dtype, or cast to its dtype later.
            defaults = [torch.get_default_dtype()]
            defaults += [buffer.dtype] if buffer.dtype.is_floating_point else []
            module, path = model.get_submodule(host), name.removeprefix(f"{host}." if host else "")
            candidates = [
                _value(made_again(host, default), module, path)
                for default in dict.fromkeys(defaults)
            ]
            fitting = [v for v in candidates if v is not None and v.shape == buffer.shape]
            if fitting:
                same = (value for value in fitting if value.dtype == buffer.dtype)
                values[name] = next(same, fitting[0]).to(buffer.dtype)
                break
    return values


def _made_again(module: nn.Module, default: torch.dtype) -> Iterator[nn.Module]:
    """Modules made like this one, if it keeps the only argument of its class: one, or two if random
    numbers were drawn. None if that fails."""
    argument = _configuration(module)
    if argument is None:
        return
    with (
        torch.random.fork_rng(devices=[]), warnings.catch_warnings(), torch.device("cpu"),
        torch.no_grad(), _parameters_on_meta(), default_dtype(default),
    ):  # fmt: skip
        warnings.simplefilter("ignore")
        try:
            state = torch.get_rng_state()
            yield type(module)(**copy.deepcopy(argument))
            if not torch.equal(state, torch.get_rng_state()):
                yield type(module)(**copy.deepcopy(argument))
        except Exception:  # whatever a user's class raises
            return


def _configuration(module: nn.Module) -> dict[str, Any] | None:
    """The only required argument of a module's class, if the module keeps it under its name and it
    is not a plain number or string: those may have been changed since."""
    arguments = list(inspect.signature(type(module).__init__).parameters.values())[1:]
    needed = [
        item.name
        for item in arguments
        if item.default is item.empty and item.kind not in (item.VAR_POSITIONAL, item.VAR_KEYWORD)
    ]
    if len(needed) != 1:
        return None
    value = vars(module).get(needed[0])
    if value is None or isinstance(value, (*SIMPLE, torch.Tensor, list, tuple)):
        return None
    return {needed[0]: value}


def _parameters_on_meta() -> AbstractContextManager[None]:
    """In this context, parameters of new modules go to the meta device: they take no memory, and
    nothing is drawn for them."""
    register = nn.Module.register_parameter

    def registered(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    return patched(nn.Module, register_parameter=registered)


def _value(twins: Sequence[nn.Module], module: nn.Module, name: str) -> torch.Tensor | None:
    """The buffer of `twins`, if there are any and all agree."""
    values = [_buffer(twin, module, name) for twin in twins]
    first = values[0] if values else None
    if first is None or any(value is None or not torch.equal(value, first) for value in values):
        return None
    return first


def _buffer(twin: nn.Module, module: nn.Module, name: str) -> torch.Tensor | None:
    """The buffer of `twin`, if on the way to it the modules are of the same classes and have the
    same numbers and names as attributes."""
    *path, leaf = name.split(".")
    for step in path:
        below, original = twin._modules.get(step), module._modules.get(step)
        if below is None or original is None or not _alike(twin, module):
            return None
        twin, module = below, original
    value = twin._buffers.get(leaf) if _alike(twin, module) else None
    return None if value is None or value.is_meta else value.detach()


def _alike(twin: nn.Module, module: nn.Module) -> bool:
    """Whether two modules are of one class and their plain attributes agree, as far as both have
    them; the mode and names with a leading underscore are ignored."""
    if type(twin) is not type(module):
        return False
    ours, theirs = vars(module), vars(twin)
    return all(
        theirs[key] == value
        for key, value in ours.items()
        if isinstance(value, SIMPLE) and key in theirs and key != "training" and key[0] != "_"
    )
