"""MODEL of the command line -> a module and its inputs.

package.module:factory      imported, with the folder you are in on the path
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
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from parcompiler.documents import path_of
from parcompiler.errors import InputError

HF = "hf:"
FORMS = "package.module:factory, path/to/file.py:factory or hf:path/to/config.json"

Made = tuple[nn.Module, Any]


@dataclass(frozen=True, slots=True)
class Sizes:
    """The size of a micro-batch, for models whose inputs are made here."""

    sequence: int | None = None
    rows: int | None = None


def check(name: str, sizes: Sizes) -> None:
    """Refuse a MODEL of no known form. Raises InputError; nothing is imported."""
    if name.startswith(HF):
        return
    place, colon, factory = name.rpartition(":")
    if not colon or not place or not factory:
        raise InputError(_formless(name))
    for option, value in (("--sequence", sizes.sequence), ("--rows", sizes.rows)):
        if value is not None:
            message = f"{option} is for hf: models; here {factory}() says what the inputs are"
            raise InputError(message)


def load(name: str, sizes: Sizes) -> Made:
    """The model and its inputs: one micro-batch. Raises InputError that says what is wrong."""
    check(name, sizes)
    if name.startswith(HF):
        from parcompiler.cli.huggingface import build

        return build(Path(name.removeprefix(HF)), sizes.sequence, sizes.rows)
    place, _, factory = name.rpartition(":")
    module = _file(Path(place)) if place.endswith(".py") else _module(place)
    return _made(_factory(module, place, factory), name)


def remarks_left_out(name: str) -> AbstractContextManager[None]:
    """Leave out what the library of an hf: model remarks while it is made and captured."""
    if not name.startswith(HF):
        return nullcontext()
    from parcompiler.cli.huggingface import silent

    return silent()


def _formless(name: str) -> str:
    """What to write instead of a name that has no colon."""
    if name.endswith(".json"):
        return f"{name!r} is no MODEL: for a configuration of transformers write hf:{name}"
    if name.endswith(".py"):
        return f"{name!r} is no MODEL: say which function makes it, as in {name}:make"
    return f"{name!r} is no MODEL: write {FORMS}"


def _module(name: str) -> ModuleType:
    """An importable module, also of the folder that the user is in, as `python -m` has it."""
    if "" not in sys.path:
        sys.path.insert(0, "")
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise InputError(_unimportable(name, error)) from error


def _file(path: Path) -> ModuleType:
    """A file as a module; files beside it can be imported by it, as by a script."""
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
        raise InputError(_unimportable(str(path), error)) from error
    return module


def _unimportable(name: str, error: BaseException) -> str:
    """Why a module cannot be imported, with the line where it went wrong."""
    return f"{name} does not import ({_cause(error)})"


def _cause(error: BaseException) -> str:
    """An error of the user's code, with the last place in it."""
    said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if isinstance(error, SyntaxError):
        return said  # it names its place itself
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith("<") and f.filename != __file__]
    outside = [f for f in own if "importlib" not in f.filename]
    return f"{said}, at {outside[-1].filename}:{outside[-1].lineno}" if outside else said


def _factory(module: ModuleType, place: str, name: str) -> Callable[[], Any]:
    """The function that makes the model."""
    found = getattr(module, name, None)
    if found is None:
        own = [
            key
            for key, value in vars(module).items()
            if callable(value)
            and not key.startswith("_")
            and getattr(value, "__module__", None) == module.__name__
        ]
        close = difflib.get_close_matches(name, own, n=1)
        hint = f"did you mean {close[0]}?" if close else f"it has: {', '.join(own) or 'nothing'}"
        message = f"{place} has no {name!r} ({hint})"
        raise InputError(message)
    if not callable(found) or isinstance(found, nn.Module):
        message = f"{name!r} of {place} is no function that makes a model, but is {_kind(found)}"
        raise InputError(message)
    factory: Callable[[], Any] = found
    return factory


def _made(factory: Callable[[], Any], name: str) -> Made:
    """What the factory returns: a module with one micro-batch of inputs."""
    try:
        made = factory()
    except (Exception, SystemExit) as error:
        message = f"{name} raised {_cause(error)}"
        raise InputError(message) from error
    if not isinstance(made, tuple) or len(made) != 2:
        message = f"{name} must return (model, inputs): what it returned is {_kind(made)}"
        raise InputError(message)
    model, inputs = made
    if not isinstance(model, nn.Module):
        message = f"{name} must return (model, inputs): its model is {_kind(model)}"
        raise InputError(message)
    if not isinstance(inputs, tuple | Mapping):
        message = (
            f"{name} must return (model, inputs), where inputs are a dict of keyword arguments or "
            f"a tuple of positional ones: they are {_kind(inputs)}"
        )
        raise InputError(message)
    return model, inputs


def _kind(value: object) -> str:
    """A value by its type."""
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return "None" if value is None else f"of type {type(value).__name__}"
