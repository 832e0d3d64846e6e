"""Compiles the templates of a rank: each once for all processes that run here, and later.

    rank 0   A ─ B ─ (C)      ranks begin with different templates; one that comes to a template
    rank 1   B ─ C ─ (A)      that another process compiles waits, and reads the result from disk

The compiler is that of torch.compile, Inductor, behind AOTAutograd, which makes one graph of a
forward and its backward and divides it. Its results are kept in its cache on disk.
"""

from __future__ import annotations

import copyreg
import fcntl
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from parcompiler.errors import LaunchError
from parcompiler.runtime.agreement import check_exchanges
from parcompiler.runtime.compiled.exchange import in_order
from parcompiler.runtime.compiled.layers import (
    CompiledLayer,
    Finder,
    Function,
    Surroundings,
    Template,
    TracedLayer,
    refuse,
)
from parcompiler.runtime.interpreter import Interpreter
from parcompiler.runtime.stage import Layer


class CompiledStages:
    """The stages of a rank, whose layers are compiled: for training, and for evaluation when that
    is first asked for."""

    def __init__(self, interpreter: Interpreter) -> None:
        for stage in interpreter.stages.values():
            stage.again = False  # in compiled layers results of `again` are marked
        self._program, self._stages = interpreter.program, interpreter.stages
        self._defers, self._channels = interpreter.defers, interpreter.channels
        axes = tuple(self._channels.axes.values())
        self._surroundings = Surroundings(self._channels.device, axes)
        held = interpreter.tensors
        tables = {held[name] for name in self._program.row_gradients if name in held}
        self._layers = {  # layers whose tables have row gradients stay eager
            j: [
                CompiledLayer(m)
                for m in stage.modules()
                if isinstance(m, Layer) and tables.isdisjoint(m.parameters())
            ]
            for j, stage in self._stages.items()
        }
        self.templates: dict[bool, list[Template]] = {}  # by training

    def prepare(self, training: bool) -> None:
        """Compile for training or evaluation, unless that is done."""
        if training in self.templates:
            return
        begin = time.perf_counter()
        modes = {module: module.training for s in self._stages.values() for module in s.modules()}
        finder = Finder(self._program, replace(self._surroundings, training=training))
        try:
            for j, stage in self._stages.items():
                finder.run(stage, self._layers[j], split=self._defers(j))
            templates = [*finder.templates.values()]
            build(templates, self._said(templates, begin))
            check_exchanges(self._program, [*self._exchanges(training)], self._channels)
        finally:
            for module, mode in modes.items():
                module.training = mode
        self.templates[training] = templates

    def _exchanges(self, training: bool) -> Iterator[str]:
        """The collectives of all layers, in the order of the stages and of their text."""
        for layers in self._layers.values():
            for template in (template for layer in layers for template in layer.templates):
                if template.surroundings.training == training:
                    yield from template.exchanges

    def _said(self, templates: Sequence[Template], begin: float) -> Callable[[int], None]:
        """A function that prints on stderr of rank 0 how many templates are compiled: at the end,
        and on a terminal after each."""
        layers, live = sum(template.count for template in templates), sys.stderr.isatty()

        def say(done: int) -> None:
            last = done == len(templates)
            if self._program.rank or not (live or last):
                return
            seconds = time.perf_counter() - begin
            text = f"parcompiler: compiled {done} of {len(templates)} templates ({layers} layers"
            end = "\n" if last else "\r"
            print(f"{text}, {seconds:.1f} s)", end=end, file=sys.stderr, flush=True)

        return say


def check_compiler(device: torch.device) -> None:
    """Raise LaunchError where nothing can be compiled for a device."""
    if device.type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler as error:
            message = (
                "compiled=True needs a C++ compiler, and there is none here: install g++ or set "
                "CXX to one, or run without compiled=True"
            )
            raise LaunchError(message) from error
    elif device.type == "cuda":
        from torch.utils._triton import has_triton

        if not has_triton():
            message = (
                "compiled=True needs Triton, and it does not work here: install triton, or run "
                "without compiled=True"
            )
            raise LaunchError(message)


def build(templates: Sequence[Template], say: Callable[[int], None]) -> None:
    """Compile templates. Raises LaunchError for one that cannot be, with its line."""
    start = int(os.environ.get("LOCAL_RANK", "0")) % max(1, len(templates))
    for done, template in enumerate([*templates[start:], *templates[:start]], 1):
        with _alone(template):
            try:
                template.function = compiled(template)
            except Exception as error:
                refuse(template, error)
        say(done)


def compiled(template: Template) -> Function:
    """The function of a template and its backward, compiled; notes the exchanges in them."""
    layer, training = TracedLayer(template), template.surroundings.training
    ignoring = warnings.catch_warnings(action="ignore")  # what torch says about itself
    with ignoring, _keys_of_all_processes(), torch.set_grad_enabled(training):
        from torch._functorch import config
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner  # imports for seconds

        def inner(graph: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
            side = "backward" if options.get("is_backward") else "forward"
            template.exchanges += [f"{template}, {side}: {call}" for call in in_order(graph.graph)]
            graph.recompile()
            return compile_fx_inner(graph, inputs, **options)

        # Compile the backward now, not within the first step. Recompute a mask in the backward from
        # a saved value: the compiler would save the mask too, a byte for each element.
        options = {
            "force_non_lazy_backward_lowering": training,
            "ban_recompute_materialized_backward": False,
        }
        with config.patch(options):
            function: Any = compile_fx(layer, layer.inputs(), inner_compile=inner)  # type: ignore[arg-type]
    return function  # type: ignore[no-any-return]


def _written_format(form: torch.memory_format) -> Any:
    """Pickle a memory format as its name."""
    return str, (str(form),)


@contextmanager
def _keys_of_all_processes() -> Iterator[None]:
    """In this context, equal graphs have equal keys in the cache of the compiler, in every process.

    Keys are hashes of pickles, and pickle finds a memory format in the first module with the name
    torch in it: in whatever module of the user imported torch first.
    """
    copyreg.pickle(torch.memory_format, _written_format)
    try:
        yield
    finally:
        del copyreg.dispatch_table[torch.memory_format]


@contextmanager
def _alone(template: Template) -> Iterator[None]:
    """In this context, no other process here compiles the same template."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    folder = Path(cache_dir()) / "parcompiler"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{template.key}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
