"""A configuration of transformers -> its model on the meta device, and a micro-batch of tokens.

Nothing is downloaded and no code of a configuration is run: `model_type` and `architectures` must
name classes of the installed transformers.
"""

from __future__ import annotations

import difflib
import inspect
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from logging import CRITICAL
from pathlib import Path
from typing import Any

import torch
from torch import nn

from parcompiler import documents
from parcompiler.errors import InputError, path_of, shown

MOST_LAYERS = 100_000  # of a model, or experts of a layer: ten times more than any model has
COUNTS = re.compile(r"(.*_)?(layers|n_layer|experts)")  # names of fields that are counts
LONGEST = 2048  # tokens in a row, unless --sequence or the model sets fewer
CLASSIFIES_ROWS = "ForSequenceClassification"


def build(
    path: Path,
    sequence: int | None,
    rows: int | None,
    *,
    data: dict[str, Any] | None = None,
    real: bool = False,
) -> tuple[nn.Module, dict[str, Any]]:
    """The model of `config.json`, or of the folder it is in, with inputs of zeros; with values on
    the CPU if `real`. `data` is what a checkpoint has of the file, in place of it.

    Raises InputError for a file that is no configuration, and for a model that is no language
    model: its inputs must come from the user.
    """
    data = read(path) if data is None else data
    _check_fields(data, path, "")
    with silent():
        config = _config(data, path)
        model = _model(config, data, path, "cpu" if real else "meta")
    return model, _inputs(model, config, sequence, rows or 1)


def read(path: Path) -> dict[str, Any]:
    """The data of a configuration. Raises InputError as `build` does."""
    path = path / "config.json" if path_of(path).is_dir() else path
    if not path.exists():
        message = (
            f"there is no file {path}: hf: takes the path of a config.json, and nothing is "
            "downloaded (fetch it first, as with 'hf download NAME config.json')"
        )
        raise InputError(message)
    data = documents.parse(documents.text_of(path), str(path), finite=False)  # Mamba has Infinity
    if not isinstance(data, dict) or not isinstance(data.get("model_type"), str):
        message = f"{path} is no configuration of transformers: it has no 'model_type'"
        raise InputError(message)
    return data


def _check_fields(data: dict[str, Any], path: Path, prefix: str) -> None:
    """Refuse fields that load code or kernels, weights of a few bits, and absurd counts."""
    for name, value in data.items():
        why = _refusal(name, value)
        if why is not None:
            message = f"{path}: {prefix}{name} {why} ({shown(value)} found)"
            raise InputError(message)
        if isinstance(value, dict):
            _check_fields(value, path, f"{prefix}{name}.")


def _refusal(name: str, value: Any) -> str | None:
    """Why a field of a configuration is refused; None if it is not."""
    plain = name.removeprefix("_")
    if plain in ("auto_map", "trust_remote_code", "use_kernels", "kernel_config") and value:
        return "loads code that is not in transformers: remove it to take the model as it is there"
    texts = value.values() if isinstance(value, dict) else [value]  # for each part of the model
    if plain.endswith("_implementation") and any("/" in text for text in map(str, texts)):
        return "loads a kernel from a repository: write 'sdpa' or 'eager'"
    if plain in ("quantization_config", "load_in_4bit", "load_in_8bit") and value:
        return "keeps weights in a few bits, which cannot be trained: remove it"
    if COUNTS.fullmatch(plain) and isinstance(value, int) and not 0 <= value <= MOST_LAYERS:
        return f"must be from 0 to {MOST_LAYERS:,}"
    return None


def _transformers() -> Any:
    """Import transformers, which only hf: models need."""
    try:
        import transformers
    except ImportError as error:
        message = f"hf: models need transformers ({error}): pip install 'parcompiler[hf]'"
        raise InputError(message) from error
    return transformers


@contextmanager
def silent() -> Iterator[None]:
    """Silence remarks of transformers about a configuration, some of them pages long."""
    logging = _transformers().logging
    before = logging.get_verbosity()
    logging.set_verbosity(CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _config(data: dict[str, Any], path: Path) -> Any:
    """The configuration as a value of its class."""
    library = _transformers()
    known, kind = library.CONFIG_MAPPING, data["model_type"]
    if kind not in known:
        close = difflib.get_close_matches(kind, list(known.keys()), n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        message = f"{path}: transformers {library.__version__} has no model_type {kind!r}{hint}"
        raise InputError(message)
    try:
        return known[kind].from_dict(data)
    except Exception as error:  # the configuration's own checks may raise anything
        message = f"{path} is no configuration of {kind!r} ({_first_line(error)})"
        raise InputError(message) from error


def _model(config: Any, data: dict[str, Any], path: Path, device: str) -> nn.Module:
    """The model on a device: of the class in `architectures`, if that has a loss."""
    library = _transformers()
    names = (name for name in data.get("architectures") or () if isinstance(name, str))
    kinds = (getattr(library, name, None) for name in names)
    kind: Any = next((kind for kind in kinds if _trains(kind)), None)
    if kind is None:
        mapping = library.MODEL_FOR_CAUSAL_LM_MAPPING
        if type(config) not in mapping:
            message = (
                f"{path}: neither 'architectures' ({data.get('architectures')}) nor "
                f"AutoModelForCausalLM has a language model with a loss for "
                f"{data['model_type']!r}: build it in a file, and give file.py:factory"
            )
            raise InputError(message)
        kind = mapping[type(config)]
    try:
        with torch.device(device):
            model: nn.Module = kind._from_config(config)
    except Exception as error:  # e.g. sizes that do not fit each other
        message = f"{path}: {kind.__name__} cannot be built ({_first_line(error)})"
        raise InputError(message) from error
    return model


def _trains(kind: object) -> bool:
    """Whether this is a class of models with tokens and labels as inputs, and so a loss."""
    if not isinstance(kind, type) or not issubclass(kind, nn.Module):
        return False
    return {"input_ids", "labels"} <= inspect.signature(kind.forward).parameters.keys()


def _inputs(model: nn.Module, config: Any, sequence: int | None, rows: int) -> dict[str, Any]:
    """One micro-batch on the device of the model."""
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    limit = longest if isinstance(longest, int) and longest > 0 else math.inf
    if sequence is not None and sequence > limit:
        message = f"--sequence {sequence} is longer than the model's rows (at most {longest})"
        raise InputError(message)
    length = int(min(limit, LONGEST)) if sequence is None else sequence
    tokens = torch.zeros(rows, length, dtype=torch.long, device=next(model.parameters()).device)
    by_row = type(model).__name__.endswith(CLASSIFIES_ROWS)
    inputs: dict[str, Any] = {"input_ids": tokens, "labels": tokens[:, 0] if by_row else tokens}
    if "use_cache" in inspect.signature(model.forward).parameters:
        inputs["use_cache"] = False  # useless in training
    return inputs


def _first_line(error: Exception) -> str:
    """The type of an error and its first lines."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])}" if lines else type(error).__name__
