"""The lines of the table: each is a function from a place to rows, the same on GPU and CPU."""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import parcompiler as pc
from benchmarks.gpu.programs import program, programs
from parcompiler.calibrate import calibrate
from parcompiler.calibrate.machine import find_machine
from parcompiler.calibrate.measure import recognized
from parcompiler.device import Device, device
from parcompiler.models import llama

WARM, STEPS = 3, 10
MICROBATCHES = 4
SHOWN = 5  # kernels, by time
SHARING = 4  # ranks that prove, where devices are fewer
WAITS = {"aten._local_scalar_dense.default", "aten.nonzero.default", "aten.equal.default"}

TINY = llama.Config(layers=2, heads=2, hidden=16, vocabulary=64, sequence=8)
BLOCK = llama.Config(layers=1, heads=32, hidden=4096, vocabulary=512, sequence=4096, ffn=14336,
                     kv_heads=8)  # fmt: skip
WHOLE = llama.Config(layers=16, heads=32, hidden=2048, vocabulary=128256, sequence=4096, ffn=8192,
                     kv_heads=8, tied=True)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table; `ok` is false where it says that something does not hold."""

    what: str
    measured: str
    expected: str = ""
    ok: bool = True


@dataclass(slots=True)
class Place:
    """Where lines run: a device, what the catalogue says of it, the figures that predict, and so
    many ranks for proofs."""

    device: torch.device
    nominal: Device
    figures: Device
    ranks: int
    folder: Path
    options: argparse.Namespace

    @property
    def large(self) -> bool:
        """Whether sizes are those of a GPU."""
        return self.device.type == "cuda"


Step = Callable[[], object]


def place_of(options: argparse.Namespace, folder: Path) -> Place:
    """The place that the command line names; figures are the catalogue's until calibrated."""
    here = torch.device("cuda:0" if options.device == "cuda" else "cpu")
    name = (recognized(find_machine()) or "h100") if here.type == "cuda" else "cpu"
    count = torch.cuda.device_count() if here.type == "cuda" else 1
    ranks = options.ranks or (max(count, SHARING) if here.type == "cuda" else 1)
    return Place(here, device(name), device(name), ranks, folder, options)


def environment(place: Place) -> str:
    """The machine, the versions and the command."""
    if place.large:
        found = torch.cuda.get_device_properties(place.device)
        count = torch.cuda.device_count()
        machine = f"{count} × {found.name}, {found.total_memory / 2**30:.0f} GiB"
        machine += f", CUDA {torch.version.cuda}"
    else:
        machine = f"CPU ({platform.machine()}), {torch.get_num_threads()} threads, tiny sizes"
    command = " ".join(["python -m benchmarks.gpu", *sys.argv[1:]])
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    return f"{machine}; {versions}; priced as {place.figures.name}: `{command}`"


def calibration(place: Place) -> Iterator[Row]:
    """Measure the device; later lines are priced by what was found."""
    path = place.options.calibration or place.folder / "device.json"
    sizes = place.options.sizes or (None if place.large else 1)
    dtypes = None if place.large else ["float32"]
    seconds = place.options.seconds if place.large else 0.002
    found = calibrate(path, dtypes=dtypes, seconds=seconds, sizes=sizes, progress=False)
    assert found is not None
    for dtype, peak in found.flops:
        nominal = dict(place.nominal.flops).get(dtype, 0.0)
        yield Row(f"{dtype}, TFLOP/s", f"{peak / 1e12:.3g}", f"catalogue {nominal / 1e12:.3g}")
    moved = f"{found.memory_bandwidth / 1e9:.0f}"
    yield Row("memory, GB/s", moved, f"catalogue {place.nominal.memory_bandwidth / 1e9:.0f}")
    place.figures = found


def proofs(place: Place) -> Iterator[Row]:
    """Each mechanism of the runtime by `verify()`: ranks on the device beside the model itself."""
    compiled = place.large or place.options.compiled
    for what, model, options, compiling in programs(place.ranks, compiled):
        begin = time.perf_counter()
        try:
            planned = program(model, options, place.nominal.name)
            found = planned.verify(compiled=compiling, progress=False, device=place.device.type)
            ok, shown = found.ok, _errors(found)
        except Exception as error:  # whatever a proof ends with is its row; others follow
            ok, shown = False, f"{type(error).__name__}: {' '.join(str(error).split())}"
        yield Row(what, shown, f"equal ({time.perf_counter() - begin:.0f} s)", ok)


def _errors(found: pc.Verification) -> str:
    """The largest error of each comparison."""
    errors = [one for one in (found.native, found.lifted) if one is not None]
    return ", ".join(
        f"{one.dtype} {one.largest:.1e}" + ("" if one.ok else f" NOT EQUAL: {one}")
        for one in dict.fromkeys(errors)
    )


def memory_and_time(place: Place) -> Iterator[Row]:
    """The peak of a rank and its step, beside what was predicted."""
    with Running(place, BLOCK if place.large else TINY) as (program, worker, batch):
        held = sum(p.numel() * p.itemsize for _, p in worker.named_parameters())
        peak, timeline = _peak(place, lambda: worker.step(batch), held), program.simulate()
        step = _seconds(place, lambda: worker.step(batch))
    predicted = timeline.peak_memory[0]
    yield Row("peak of a step, MiB", f"{peak / 2**20:.1f}", f"predicted {predicted / 2**20:.1f}")
    predicted_ms = f"predicted {1e3 * timeline.step_time:.2f}"
    yield Row("a step, ms", f"{1e3 * step:.2f}", predicted_ms)


def kernels(place: Place) -> Iterator[Row]:
    """What ran in a step, the attention kernel by its name, and how long the device had nothing."""
    with Running(place, BLOCK if place.large else TINY) as (_, worker, batch):
        _seconds(place, lambda: worker.step(batch))
        events = _events(place, lambda: worker.step(batch))
    times: Counter[str] = Counter()
    for name, begin, end in events:
        times[name] += end - begin
    total = sum(times.values())
    flash = sorted(name for name in times if "flash" in name.lower())
    yield Row("FlashAttention", _short(flash[0]) if flash else "none ran", "a kernel", bool(flash))
    for name, spent in times.most_common(SHOWN):
        yield Row(_short(name), f"{100 * spent / total:.0f} % of the time")
    span, busy, last = 0, 0, 0
    for _, begin, end in sorted(events, key=lambda event: event[1]):
        busy += max(0, end - max(begin, last))
        last = max(last, end)
    span = last - min(begin for _, begin, _ in events)
    yield Row("idle between kernels", f"{100 * (1 - busy / span):.1f} % of a step", "small")


def utilisation(place: Place) -> Iterator[Row]:
    """Model FLOPs of a step over its time and the device's peak: one block, and 1B parameters."""
    sizes = {"Llama block": BLOCK, "Llama 1B": WHOLE} if place.large else {"Llama": TINY}
    compiled = place.large or place.options.compiled
    for name, config in sizes.items():
        for what, step, flops in _variants(place, config, compiled):
            seconds, most = _seconds(place, step), _peak(place, step) if place.large else 0
            peak = place.nominal.peak(_dtype(place))
            shown = f"{1e3 * seconds:.2f} ms, MFU {100 * flops / seconds / peak:.1f} %"
            shown += f", peak {most / 2**30:.1f} GiB" if most else ""
            yield Row(f"{name}, {str(_dtype(place)).removeprefix('torch.')}, {what}", shown)
            del step


def _variants(
    place: Place, config: llama.Config, compiled: bool
) -> Iterator[tuple[str, Step, float]]:
    """Steps of the original model and of the emitted one, eager and compiled, and their FLOPs."""
    flops = 0.0
    for what, step, flops in _originals(place, config, compiled):
        yield what, step, flops
        del step
    for flag in (False, True) if compiled else (False,):
        with Running(place, config, compiled=flag) as (_, worker, batch):
            kind = "compiled" if flag else "eager"
            yield f"emitted, {kind}", partial(worker.step, batch), flops
        del worker  # and its memory, before the next one is made


def _originals(
    place: Place, config: llama.Config, compiled: bool
) -> Iterator[tuple[str, Step, float]]:
    """Those of the model itself, in a loop over the same micro-batches."""
    batch = {name: x.to(place.device) for name, x in _batch(config, MICROBATCHES).items()}
    parts = [{name: x[k : k + 1] for name, x in batch.items()} for k in range(MICROBATCHES)]

    def made(dtype: torch.dtype) -> llama.Llama:
        torch.manual_seed(0)
        return llama.Llama(config).to(place.device, dtype)

    def original(model: nn.Module, run: Callable[..., Tensor], mixed: bool = False) -> None:
        model.zero_grad(set_to_none=True)
        for part in parts:
            with torch.autocast(place.device.type, torch.bfloat16, enabled=mixed):
                loss = run(**part) / MICROBATCHES
            loss.backward()

    model = made(_dtype(place))
    # the fused kernels of grouped attention are not counted
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        original(model, model)
    flops = float(counter.get_total_flops())
    yield "original, eager", partial(original, model, model), flops
    if compiled:
        yield "original, compiled", partial(original, model, torch.compile(model)), flops
    del model
    model = made(torch.float32)
    yield "original, autocast", partial(original, model, model, True), flops
    if compiled:
        step = partial(original, model, torch.compile(model), True)
        yield "original, autocast, compiled", step, flops


def synchronizations(place: Place) -> Iterator[Row]:
    """Where the host waits for the device in a step."""
    with Running(place, TINY) as (_, worker, batch):
        worker.step(batch)
        with HostWaits() as waits, warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            if place.large:
                torch.cuda.set_sync_debug_mode("warn")
            try:
                worker.step(batch)
            finally:
                if place.large:
                    torch.cuda.set_sync_debug_mode("default")
    slow = [item for item in found if "synchron" in str(item.message)]
    lines = Counter(f"{Path(item.filename).name}:{item.lineno}" for item in slow)
    yield Row("operators that wait", ", ".join(waits.found) or "none", "none", not waits.found)
    listed = ", ".join(f"{line} × {count}" for line, count in lines.items())
    yield Row("set_sync_debug_mode", listed or ("none" if place.large else "CUDA only"))


def resumed(place: Place) -> Iterator[Row]:
    """Whether a worker that loads a checkpoint goes on with the bits of the one that saved it."""
    for way in ("asynchronously", "at once"):
        ends = []
        for flag in (False, True):
            with Running(place, TINY, optimizer="adamw") as (_, worker, batch):
                worker.set_optimizer(torch.optim.AdamW, lr=1e-2)
                folder = place.folder / way
                if flag:
                    worker.load(folder)
                else:
                    worker.train_step(batch)
                    worker.save(folder, asynchronous=way == "asynchronously")
                worker.train_step(batch)
                ends.append(worker.gather_state_dict())
        equal = all(torch.equal(x, ends[1][name]) for name, x in ends[0].items())
        yield Row(f"saved {way}", "the same bits" if equal else "OTHERS", "the same bits", equal)


class HostWaits(TorchDispatchMode):
    """Finds operators that make the host wait for the device, or copy to the host."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        copied = str(func) == "aten._to_copy.default" and args[0].is_cuda and result.is_cpu
        if str(func) in WAITS or copied:
            self.found[str(func).removeprefix("aten.")] += 1
        return result


LINES: Mapping[str, Callable[[Place], Iterator[Row]]] = {
    "calibration": calibration,
    "proofs": proofs,
    "memory and time": memory_and_time,
    "kernels": kernels,
    "utilisation": utilisation,
    "synchronizations": synchronizations,
    "resumed": resumed,
}


class Running:
    """A program of one rank and its worker, in the dtype of the place, within a `with`."""

    def __init__(
        self,
        place: Place,
        config: llama.Config,
        compiled: bool = False,
        optimizer: str = "none",
    ) -> None:
        torch.manual_seed(0)
        model, inputs = llama.Llama(config), _batch(config, 1)
        precision = "bf16" if place.large else None
        self.program = pc.compile(
            model,
            pc.Mesh(device=place.figures),
            inputs,
            microbatches=MICROBATCHES,
            precision=precision,
            optimizer=optimizer,
            progress=False,
        )
        self._batch = _batch(config, MICROBATCHES)
        self._compiled = compiled

    def __enter__(self) -> tuple[pc.Program, Any, dict[str, Tensor]]:
        self._worker = self.program.worker(compiled=self._compiled)
        return self.program, self._worker, self._batch

    def __exit__(self, *_: object) -> None:
        self._worker.close()


def _batch(config: llama.Config, rows: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(config.vocabulary, (rows, config.sequence + 1), generator=generator)
    return {"tokens": words[:, :-1], "labels": words[:, 1:]}


def _dtype(place: Place) -> torch.dtype:
    return torch.bfloat16 if place.large else torch.float32


def _wait(place: Place) -> None:
    if place.large:
        torch.cuda.synchronize(place.device)


def _seconds(place: Place, step: Step) -> float:
    """The median of some steps, each until the device is done."""
    times = []
    for _ in range(WARM + STEPS):
        _wait(place)
        begin = time.perf_counter()
        step()
        _wait(place)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[WARM:])


def _peak(place: Place, step: Step, held: int = 0) -> int:
    """The most bytes allocated in a step; on a CPU `held` before it and what it allocates."""
    step()
    if place.large:
        torch.cuda.reset_peak_memory_stats(place.device)
        step()
        return torch.cuda.max_memory_allocated(place.device)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        step()
    assert found.profiler is not None
    events = found.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    now = most = 0
    for _, nbytes in changes:
        now += nbytes
        most = max(most, now)
    return 2 * held + most  # gradients are there from the step before


def _events(place: Place, step: Step) -> list[tuple[str, int, int]]:
    """Name, begin and end (ns) of the kernels of a step; on a CPU of its operators."""
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if place.large else [])]
    with profile(activities=kinds) as found:
        step()
        _wait(place)
    assert found.profiler is not None
    wanted = torch.autograd.DeviceType.CUDA if place.large else torch.autograd.DeviceType.CPU
    events = [
        (e.name(), e.start_ns(), e.start_ns() + e.duration_ns())
        for e in found.profiler.kineto_results.events()
        if e.device_type() == wanted and (place.large or e.name().startswith("aten::"))
    ]
    return [event for event in events if event[2] > event[1]]


def _short(name: str) -> str:
    """A name that fits into a table."""
    name = name.replace("|", "/")
    return f"`{name if len(name) <= 60 else name[:57] + '...'}`"
