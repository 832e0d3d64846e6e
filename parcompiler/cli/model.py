"""MODEL of the command line -> a module, its inputs, and the loss of its outputs.

package.module:factory      imported, with the current folder on the path
path/to/file.py:factory     imported from the file, with its folder on the path
hf:path/to/config.json      a configuration of transformers, on the meta device
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from parcompiler.cli.words import HF
from parcompiler.errors import InputError, path_of

FORMS = "write package.module:factory, path/to/file.py:factory or hf:path/to/config.json"

Loss = Callable[[Any], torch.Tensor]
Made = tuple[nn.Module, Any, Loss | None]  # None: the model returns the loss


def check(name: str, sequence: int | None, rows: int | None) -> None:
    """Refuse a MODEL in an unknown form. Raises InputError; nothing is imported."""
    if name.startswith(HF):
        return
    place, colon, factory = name.rpartition(":")
    if not colon or not place or not factory:
        example = FORMS
        if name.endswith(".json"):
            example = f"for a configuration of transformers write hf:{name}"
        elif name.endswith(".py"):
            example = f"say which function makes it, as in {name}:make"
        message = f"{name!r} is no MODEL: {example}"
        raise InputError(message)
    for option, value in (("--sequence", sequence), ("--rows", rows)):
        if value is not None:
            message = f"{option} is for hf: models; here {factory}() says what the inputs are"
            raise InputError(message)


def load(name: str, sequence: int | None, rows: int | None, *, real: bool = False) -> Made:
    """The model, its inputs (one micro-batch) and its loss. Raises InputError with the cause.

    `sequence` and `rows` are the size of a micro-batch, for models whose inputs are made here, with
    values if `real`.
    """
    check(name, sequence, rows)
    if name.startswith(HF):
        from parcompiler.cli.huggingface import build

        return *build(Path(name.removeprefix(HF)), sequence, rows, real=real), None
    place, _, factory = name.rpartition(":")
    module = _file(Path(place)) if place.endswith(".py") else _module(place)
    return _made(_factory(module, place, factory), name)


def remarks_left_out(name: str) -> AbstractContextManager[None]:
    """Silence transformers while an hf: model is made and captured."""
    if not name.startswith(HF):
        return nullcontext()
    from parcompiler.cli.huggingface import silent

    return silent()


def _module(name: str) -> ModuleType:
    """Import a module, also from the current folder, as `python -m` does."""
    if "" not in sys.path:
        sys.path.insert(0, "")
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        message = f"{name} does not import ({_cause(error)})"
        raise InputError(message) from error


def _file(path: Path) -> ModuleType:
    """Import a file as a module; it can import files beside it, as a script can."""
    if not path_of(path).is_file():
        message = f"there is no file {path}"
        raise InputError(message)
    name = path.stem if path.stem not in sys.modules else f"parcompiler_model_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.absolute())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.absolute().parent))
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        message = f"{path} does not import ({_cause(error)})"
        raise InputError(message) from error
    return module


def _cause(error: BaseException) -> str:
    """An error of the user's code, with the last place in it."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if isinstance(error, SyntaxError):
        return text  # has its place in the text
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<")
        and frame.filename != __file__
        and "importlib" not in frame.filename
    ]
    return f"{text}, at {frames[-1].filename}:{frames[-1].lineno}" if frames else text


def _factory(module: ModuleType, place: str, name: str) -> Callable[[], Any]:
    """The function that makes the model."""
    factory: Callable[[], Any] | None = getattr(module, name, None)
    if factory is None:
        functions = [
            key
            for key, value in vars(module).items()
            if callable(value)
            and not key.startswith("_")
            and getattr(value, "__module__", None) == module.__name__
        ]
        close = difflib.get_close_matches(name, functions, n=1)
        known = ", ".join(functions) or "nothing"
        hint = f"did you mean {close[0]}?" if close else f"it has: {known}"
        message = f"{place} has no {name!r} ({hint})"
        raise InputError(message)
    if not callable(factory) or isinstance(factory, nn.Module):
        message = f"{name!r} of {place} is no function that makes a model, but is {_kind(factory)}"
        raise InputError(message)
    return factory


def _made(factory: Callable[[], Any], name: str) -> Made:
    """The result of the factory: a module with one micro-batch of inputs, and perhaps a loss."""
    try:
        made = factory()
    except (Exception, SystemExit) as error:
        message = f"{name} raised {_cause(error)}"
        raise InputError(message) from error
    fault = ""
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        fault = f": what it returned is {_kind(made)}"
    elif not isinstance(made[0], nn.Module):
        fault = f": its model is {_kind(made[0])}"
    elif not isinstance(made[1], tuple | Mapping):
        fault = (
            ", where inputs are a dict of keyword arguments or a tuple of positional ones: they "
            f"are {_kind(made[1])}"
        )
    elif len(made) == 3 and not callable(made[2]):
        fault = f", where loss is a function of the model's outputs: it is {_kind(made[2])}"
    if fault:
        message = f"{name} must return (model, inputs) or (model, inputs, loss){fault}"
        raise InputError(message)
    return made if len(made) == 3 else (*made, None)


def _kind(value: object) -> str:
    """A value's type in words."""
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return "None" if value is None else f"of type {type(value).__name__}"
