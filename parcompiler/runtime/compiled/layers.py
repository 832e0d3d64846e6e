"""The templates of the stages of a rank, and the layers that call the compiled functions.

    stages ─► run without data ─► templates ─► build ─► functions ─► layer.forward
              each call of a layer: its text,           of arguments, tensors, extras
              and the forms of what it is given

Layers with the same text and tensors of the same forms are instances of one template: their
parameters are inputs of one compiled function. A template is compiled for training, with its
backward, and separately for evaluation.
"""

from __future__ import annotations

import hashlib
import inspect
import linecache
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.func import functional_call
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from parcompiler.errors import LaunchError
from parcompiler.runtime.axis import Axis, within
from parcompiler.runtime.compiled.exchange import TracedAxis
from parcompiler.runtime.compiled.tracing import Extra, TensorForm, Trace
from parcompiler.runtime.deferred import Deferral
from parcompiler.runtime.program import RankProgram
from parcompiler.runtime.stage import Layer, Stage

Function = Callable[..., Sequence[torch.Tensor]]


@dataclass(frozen=True)
class Surroundings:
    """The context in which layers are traced: `device`, groups of ranks and mode.

    With `split`, products for weights are left for later.
    """

    device: torch.device
    axes: tuple[Axis, ...] = ()
    training: bool = True
    split: bool = False

    @contextmanager
    def active(self) -> Iterator[None]:
        """In this context, collectives of layers are operators."""
        groups = within(*map(TracedAxis.of, self.axes))
        leaving = Deferral().forward() if self.split else nullcontext()
        with torch.set_grad_enabled(self.training), groups, leaving:
            yield


@dataclass(eq=False)
class Template:
    """Layers that one compiled function computes; `layer` is the first of them.

    `arguments`, `tensors` and `results` are the forms of the function's inputs and outputs,
    `extras` its other inputs, `exchanges` its collectives in order. `key` identifies it in all
    processes.
    """

    key: str
    layer: Layer
    arguments: tuple[TensorForm, ...]
    tensors: tuple[TensorForm, ...]
    surroundings: Surroundings
    extras: list[Extra] = field(default_factory=list)
    results: tuple[TensorForm, ...] = ()
    single: bool = True  # whether the layer returns a tensor, not a tuple
    count: int = 0  # of layers
    function: Function | None = None
    exchanges: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """Its class and file, for people."""
        kind = type(self.layer)
        file = kind.forward.__code__.co_filename.replace("\\", "/").rpartition("/")[2]
        file = file.removeprefix("<parcompiler ").rstrip(">")  # of one in memory
        return f"{kind.__name__} of {file}"

    def fits(self, arguments: Sequence[torch.Tensor]) -> bool:
        """Whether the function takes these arguments, strides aside."""
        return all(
            x.shape == form.shape and x.requires_grad == form.carries
            for x, form in zip(arguments, self.arguments, strict=True)
        )


class CompiledLayer:
    """The forward of a layer, which calls the compiled functions of its templates."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        self.finder: Finder | None = None  # while it runs
        self.templates: list[Template] = []
        self.places = [
            (owner._parameters if leaf in owner._parameters else owner._buffers, leaf)
            for _, (owner, leaf) in places_of(layer)
        ]
        layer.__dict__["forward"] = self

    def __call__(self, *arguments: torch.Tensor) -> Any:
        """Compute the layer, eagerly for arguments that it was not compiled for."""
        if self.finder is not None:
            return self.finder.call(self, arguments)
        mode = self.layer.training and torch.is_grad_enabled()
        for template in self.templates:
            if template.surroundings.training == mode and template.fits(arguments):
                break
        else:
            return type(self.layer).forward(self.layer, *arguments)
        assert template.function is not None
        inputs = [
            x
            if x.stride() == form.stride
            else torch.empty_strided(x.shape, form.stride, dtype=x.dtype, device=x.device).copy_(x)
            for x, form in zip(arguments, template.arguments, strict=True)
        ]
        tensors = self.tensors()
        inputs += tensors
        for extra in template.extras:
            inputs += extra.make(tensors)
        results = template.function(*inputs)
        return results[0] if template.single else tuple(results)

    def tensors(self) -> list[torch.Tensor]:
        """The parameters and buffers that the layer has now."""
        return [owner[leaf] for owner, leaf in self.places]  # type: ignore[misc]  # none is None


class Finder:
    """Runs stages without data, and finds the templates that their layers are instances of."""

    def __init__(self, program: RankProgram, surroundings: Surroundings) -> None:
        self.templates: dict[str, Template] = {}
        self._program, self._surroundings = program, surroundings
        self._mode = FakeTensorMode()

    def run(self, stage: Stage, layers: Sequence[CompiledLayer], *, split: bool) -> None:
        """Find the templates of a stage's layers, with a `split` backward or a whole one. Raises
        LaunchError for what cannot be compiled, with its line."""
        training = self._surroundings.training
        self._surroundings = replace(self._surroundings, split=training and split)
        stage.train(training)
        stage._versions = None  # constants without data, which are forgotten afterwards
        for layer in layers:
            layer.finder = self
        try:
            with self._mode, self._surroundings.active():
                tensors = _without_data(stage, self._surroundings.device)
                functional_call(stage, tensors, kwargs=dict(self._arguments(stage)))
        finally:
            stage.once, stage._versions = (), None
            for layer in layers:
                layer.finder = None

    def call(self, compiled: CompiledLayer, arguments: Sequence[torch.Tensor]) -> Any:
        """Run a layer and note its template. Returns the layer's results."""
        tensors = compiled.tensors()
        key = key_of(compiled.layer, arguments, tensors, self._surroundings)
        template = self.templates.get(key)
        if template is None:
            template = self.templates[key] = Template(
                key, compiled.layer, tuple(map(TensorForm.of, arguments)),
                tuple(map(TensorForm.of, tensors)), self._surroundings,
            )  # fmt: skip
            results = find_extras(template, arguments, tensors)
        else:
            results = [form.empty(self._surroundings.device) for form in template.results]
        if template not in compiled.templates:
            compiled.templates.append(template)
            template.count += 1
        return results[0] if template.single else tuple(results)

    def _arguments(self, stage: Stage) -> Iterator[tuple[str, torch.Tensor]]:
        """The inputs of a stage for a micro-batch, without data."""
        program, device = self._program, self._surroundings.device
        for name in stage.inputs:
            spec = program.inputs[name]
            yield name, torch.empty(spec.shape, dtype=spec.dtype, device=device)
        for name in stage.receives:
            value = program.values[name]
            order = value.order or tuple(range(len(value.shape)))
            made = torch.empty([value.shape[d] for d in order], dtype=value.dtype, device=device)
            carries = self._surroundings.training and value.differentiable
            made = made.permute([order.index(dim) for dim in range(len(order))])
            yield name, made.requires_grad_(carries)


def find_extras(
    template: Template, arguments: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor]:
    """Run the layer of a template without data, and note its extras and the forms of its results,
    which are returned. Raises LaunchError as `Finder.run` does."""
    trace = Trace(tensors)
    try:
        with trace.active():
            made = type(template.layer).forward(template.layer, *arguments)
    except Exception as error:
        refuse(template, error)
    template.single = not isinstance(made, tuple)
    results: tuple[torch.Tensor, ...] = (made,) if template.single else made
    template.extras, template.results = trace.extras, tuple(map(TensorForm.of, results))
    return results


class TracedLayer(nn.Module):
    """The layer of a template as a function of tensors alone: arguments, tensors, extras."""

    def __init__(self, template: Template) -> None:
        super().__init__()
        self._template = (template,)  # its layer is not a part of this module
        self._paths = [path for path, _ in places_of(template.layer)]

    def forward(self, *flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The tensors that the layer returns."""
        (template,) = self._template
        layer, first = template.layer, len(template.arguments)
        arguments, tensors = flat[:first], flat[first : first + len(self._paths)]
        eager = layer.__dict__.pop("forward", None)
        try:
            trace = Trace(tensors, flat[first + len(self._paths) :])
            with template.surroundings.active(), trace.active():
                named = dict(zip(self._paths, tensors, strict=True))
                made = functional_call(layer, named, arguments)
        finally:
            if eager is not None:
                layer.__dict__["forward"] = eager
        return made if isinstance(made, tuple) else (made,)

    def inputs(self) -> list[torch.Tensor]:
        """Inputs without data."""
        (template,) = self._template
        forms = [*template.arguments, *template.tensors]
        forms += [TensorForm.of(like) for extra in template.extras for like in extra.like]
        with FakeTensorMode(shape_env=ShapeEnv()):  # the compiler's cache needs one
            return [form.empty(template.surroundings.device) for form in forms]


def places_of(layer: nn.Module) -> list[tuple[str, tuple[nn.Module, str]]]:
    """The parameters and buffers of a layer: path, module and attribute."""
    return [
        (f"{path}.{leaf}".lstrip("."), (module, leaf))
        for path, module in layer.named_modules(remove_duplicate=False)
        for leaf, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None
    ]


def text_of(layer: Layer) -> str:
    """The source text of a layer's methods."""
    kind = type(layer)
    methods = [vars(kind)[name] for name in ("__init__", "forward") if name in vars(kind)]
    return "\n".join(inspect.getsource(method) for method in methods)


def key_of(
    layer: Layer,
    arguments: Sequence[torch.Tensor],
    tensors: Sequence[torch.Tensor],
    surroundings: Surroundings,
) -> str:
    """The key of a template: a digest of text, forms of inputs, and groups."""
    text, groups = text_of(layer), [(g.name, g.size, g.rank) for g in surroundings.axes]
    if "runtime." not in text:  # it neither exchanges nor asks for its rank
        groups = []  # so that all ranks have one
    facts = [
        *map(TensorForm.of, arguments), len(arguments), *map(TensorForm.of, tensors),
        surroundings.device, surroundings.training, surroundings.split, groups, torch.__version__,
    ]  # fmt: skip
    return hashlib.sha256(f"{text}\n{facts}".encode()).hexdigest()


def refuse(template: Template, error: Exception) -> NoReturn:
    """Raise LaunchError for a layer that cannot be compiled, with the line of its text."""
    file = type(template.layer).forward.__code__.co_filename
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
    where = str(template)
    if lines and lines[-1]:
        where += f", line {lines[-1]} (`{linecache.getline(file, lines[-1]).strip()}`)"
    reason = str(error).strip().partition("\n")[0]
    message = (
        f"{where} cannot be compiled ({type(error).__name__}: {reason}): run without compiled=True"
    )
    raise LaunchError(message) from error


def _without_data(stage: Stage, device: torch.device) -> dict[str, torch.Tensor]:
    """Tensors like those of a stage, without data; shared ones stay shared."""
    made: dict[int, torch.Tensor] = {}
    named = {}
    for path, (owner, leaf) in places_of(stage):
        tensor = getattr(owner, leaf)
        named[path] = made.setdefault(id(tensor), TensorForm.of(tensor).empty(device))
    return named
