"""What does a step cost with compiled layers, beside eager ones and beside torch.compile?

    python benchmarks/compiled/run.py [--models gpt llama ...] [--pairs 12]
    python benchmarks/compiled/run.py --depth          # seconds to compile 12 and 48 layers
    python benchmarks/compiled/run.py --kernels        # what a step of one rank consists of

On one rank the emitted program and the model itself, each eager and compiled, take turns step by
step; on two ranks (pipeline, 1F1B) the emitted program does. Each is run with 4 and with 8 layers:
what a step of 8 takes longer is what layers take. One thread a process.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import parcompiler as pc
from parcompiler.models import bert, gpt, llama, resnet, t5

MICROBATCHES, ROWS = 2, 2
LAYERS = 4, 8
WIDTHS = {"heads": 4, "hidden": 256, "vocabulary": 512, "sequence": 128}
RESNETS = (2, 1, 1, 1), (2, 3, 3, 3)  # blocks of each width
VARIANTS = ("emitted", "compiled", "model", "torch.compile")
RATIOS = (1, 0), (3, 2), (1, 3)  # of variants
WARM = 2  # rounds that are not counted
TOLERANCE = 1e-4  # of losses, float32
TIMEOUT = timedelta(minutes=20)
MODELS = ("gpt", "llama", "bert", "t5", "resnet", "hf-gpt2", "hf-llama")
DEPTHS = (12, 48)
# Parts of the names of kernels that eager and compiled layers call alike.
LIBRARIES = ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "attention", "convolution")


def main() -> None:
    """Print the table."""
    options = _options()
    if options.compile is not None:
        _time_compilation(options.compile)
        return
    if options.depth:
        _print_depths()
        return
    if options.kernels:
        _print_kernels(options.models, options.pairs)
        return
    names = [f"{VARIANTS[over]} / {VARIANTS[under]}" for over, under in RATIOS]
    cells = ["model", "ranks", *VARIANTS, *names, *(f"layers: {name}" for name in names)]
    print(f"| {' | '.join(cells)} |\n|{'---|' * len(cells)}")
    for name in options.models:
        for ranks in options.ranks:
            print(_row(name, ranks, options.pairs), flush=True)


def _options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--ranks", nargs="+", type=int, choices=(1, 2), default=(1, 2))
    parser.add_argument("--pairs", type=int, default=12, help="steps of each (12)")
    parser.add_argument("--depth", action="store_true", help="time compilation at two depths")
    parser.add_argument("--kernels", action="store_true", help="what a step consists of")
    parser.add_argument("--compile", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def model_of(name: str, layers: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A model, and the batch of a step."""
    torch.manual_seed(0)
    rows = MICROBATCHES * ROWS
    tokens = torch.randint(WIDTHS["vocabulary"], (rows, WIDTHS["sequence"]))
    if name == "resnet":
        images, classes = torch.randn(rows, 3, 64, 64), torch.randint(10, (rows,))
        depths = RESNETS[LAYERS.index(layers)]
        config = resnet.Config(depths=depths, widths=(16, 32, 64, 128), classes=10, image_size=64)
        return resnet.ResNet(config), {"images": images, "labels": classes}
    if name.startswith("hf-"):
        return _of_huggingface(name, layers), {"input_ids": tokens, "labels": tokens.clone()}
    batch = {"tokens": tokens, "labels": tokens.roll(1, 1)}
    sizes: dict[str, Any] = {"layers": layers, **WIDTHS}
    if name == "t5":
        return t5.T5(t5.Config(**sizes)), {"decoder_tokens": tokens, **batch}
    made: dict[str, Callable[[], nn.Module]] = {
        "gpt": lambda: gpt.GPT(gpt.Config(**sizes)),
        "llama": lambda: llama.Llama(llama.Config(**sizes)),
        "bert": lambda: bert.BERT(bert.Config(**sizes)),
    }
    return made[name](), batch


def _of_huggingface(name: str, layers: int) -> nn.Module:
    """GPT-2 or Llama of transformers, without dropout."""
    import transformers

    if name == "hf-gpt2":
        config = transformers.GPT2Config(
            vocab_size=WIDTHS["vocabulary"], n_positions=WIDTHS["sequence"], n_layer=layers,
            n_embd=WIDTHS["hidden"], n_head=WIDTHS["heads"], use_cache=False,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        model = transformers.GPT2LMHeadModel(config)
        model.loss_type = "ForCausalLM"  # without it there is a warning, and a graph break
        return model
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=WIDTHS["vocabulary"], hidden_size=WIDTHS["hidden"], intermediate_size=768,
        num_hidden_layers=layers, num_attention_heads=WIDTHS["heads"], num_key_value_heads=2,
        max_position_embeddings=WIDTHS["sequence"], use_cache=False,
    ))  # fmt: skip


def program_of(model: nn.Module, batch: dict[str, torch.Tensor], ranks: int) -> pc.Program:
    """The program, divided evenly."""
    inputs = {key: value[:ROWS] for key, value in batch.items()}
    return pc.compile(
        model, pc.Mesh(pipeline=ranks, device="cpu"), inputs, microbatches=MICROBATCHES,
        schedule="1f1b", vocabulary="whole", stages="even", recompute="none", progress=False,
    )  # fmt: skip


def _row(name: str, ranks: int, pairs: int) -> str:
    """The row of a model: medians of CPU time in ms, and of ratios of neighbouring steps."""
    with tempfile.TemporaryDirectory() as here:
        multiprocessing.spawn(_rank, (here, name, ranks, pairs), nprocs=ranks)
        each = [json.loads((Path(here) / f"{rank}.json").read_text()) for rank in range(ranks)]
    turns = zip(*each, strict=True)
    rounds = [[float(sum(column)) for column in zip(*parts, strict=True)] for parts in turns]
    half = len(rounds[0]) // 2
    deep = [seconds[half:] for seconds in rounds]
    layers = [[b - a for a, b in zip(r[:half], r[half:], strict=True)] for r in rounds]
    times = [f"{1e3 * statistics.median(column):.0f}" for column in zip(*deep, strict=True)]
    times += [""] * (len(VARIANTS) - half)
    ratios = [
        _ratio(each, *pair) if max(pair) < half else ""
        for each in (deep, layers)
        for pair in RATIOS
    ]
    return f"| {' | '.join([name, str(ranks), *times, *ratios])} |"


def _ratio(rounds: list[list[float]], over: int, under: int) -> str:
    """The median of a ratio, with quartiles."""
    low, middle, high = statistics.quantiles([r[over] / r[under] for r in rounds], n=4)
    return f"{middle:.2f} ({low:.2f}-{high:.2f})"


def _rank(rank: int, here: str, name: str, ranks: int, pairs: int) -> None:
    """One process: CPU seconds of a step of each variant, in turn."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{here}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=TIMEOUT)
    os.environ["RANK"] = str(rank)
    with ExitStack() as stack:
        steps: list[Callable[[], torch.Tensor]] = []
        for layers in LAYERS:
            mine = _variants(name, layers, ranks, stack)
            losses = [step().item() for step in mine]
            if max(losses) / min(losses) - 1 > TOLERANCE:
                message = f"the losses differ: {losses}"
                raise RuntimeError(message)
            steps += mine
        rounds = [_round(steps, turn) for turn in range(-WARM, pairs)][WARM:]
        dist.barrier()
    (Path(here) / f"{rank}.json").write_text(json.dumps(rounds))
    dist.destroy_process_group()


def _variants(
    name: str, layers: int, ranks: int, stack: ExitStack
) -> list[Callable[[], torch.Tensor]]:
    """What does a step of each variant."""
    model, batch = model_of(name, layers)
    program = program_of(model, batch, ranks)
    eager = stack.enter_context(program.worker())
    compiled = stack.enter_context(program.worker(compiled=True))
    steps: list[Callable[[], torch.Tensor]]
    steps = [lambda: eager.step(batch), lambda: compiled.step(batch)]
    if ranks == 1:
        whole = torch.compile(model, fullgraph=True, dynamic=False)
        steps += [lambda: _step(model, model, batch), lambda: _step(whole, model, batch)]
    return steps


def _step(call: Any, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """A step of the model itself, micro-batch by micro-batch."""
    model.zero_grad(set_to_none=True)
    losses = []
    for i in range(MICROBATCHES):
        part = {key: value[i * ROWS : (i + 1) * ROWS] for key, value in batch.items()}
        result = call(**part)
        loss: torch.Tensor = result if isinstance(result, torch.Tensor) else result.loss
        (loss / MICROBATCHES).backward()
        losses.append(loss.detach())
    return torch.stack(losses).mean()


def _round(steps: list[Callable[[], torch.Tensor]], turn: int) -> list[float]:
    """CPU seconds of a step of each; who begins changes."""
    seconds = [0.0] * len(steps)
    for k in range(len(steps)):
        which = (k + turn) % len(steps)
        gc.collect(0)
        dist.barrier()
        begin = time.process_time()
        steps[which]()
        seconds[which] = time.process_time() - begin
    return seconds


def _print_depths() -> None:
    """Compile a GPT of each depth with an empty cache, and print what it took."""
    print("| layers | templates | CPU (s) | wall (s) |\n|---|---|---|---|")
    for layers in DEPTHS:
        with tempfile.TemporaryDirectory() as cache:
            command = [sys.executable, __file__, "--compile", str(layers)]
            more = {"TORCHINDUCTOR_CACHE_DIR": cache, "LOCAL_WORLD_SIZE": "1024"}  # no helpers
            subprocess.run(command, check=True, env=os.environ | more)


def _time_compilation(layers: int) -> None:
    """Print what it takes to compile a GPT for training."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    program = program_of(*model_of("gpt", layers), 1)
    program.worker().close()
    begin = _cpu(), time.perf_counter()
    with program.worker(compiled=True) as worker:
        end = _cpu(), time.perf_counter()
        assert worker.compiled is not None
        templates = len(worker.compiled.templates[True])
    print(f"| {layers} | {templates} | {end[0] - begin[0]:.1f} | {end[1] - begin[1]:.1f} |")
    dist.destroy_process_group()


class _Libraries(TorchDispatchMode):
    """Adds up the CPU seconds of kernels that eager and compiled layers call alike."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a kernel."""
        if not any(name in str(func) for name in LIBRARIES):
            return func(*args, **(kwargs or {}))
        begin = time.thread_time()
        result = func(*args, **(kwargs or {}))
        self.seconds += time.thread_time() - begin
        return result


def _print_kernels(models: Sequence[str], steps: int) -> None:
    """Print what part of a step of 8 layers on one rank is in libraries: medians of CPU time."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    print("| model | step: emitted | compiled | libraries: emitted | compiled | floor |")
    print("|---|---|---|---|---|---|")
    for name in models:
        with ExitStack() as stack:
            mine = _variants(name, LAYERS[1], 1, stack)[:2]
            rounds = [(*_round(mine, k), *map(_in_libraries, mine)) for k in range(steps + WARM)]
        columns = [statistics.median(column) for column in zip(*rounds[WARM:], strict=True)]
        floor = statistics.median(kernels / step for step, _, kernels, _ in rounds[WARM:])
        cells = [f"{1e3 * seconds:.1f}" for seconds in columns]
        print(f"| {name} | {' | '.join(cells)} | {floor:.2f} |", flush=True)
    dist.destroy_process_group()


def _in_libraries(step: Callable[[], torch.Tensor]) -> float:
    """CPU seconds of a step in these kernels."""
    with _Libraries() as mode:
        step()
    return mode.seconds


def _cpu() -> float:
    """CPU seconds of this process and of those that it has started and that have ended."""
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    used = [resource.getrusage(kind) for kind in kinds]
    return sum(each.ru_utime + each.ru_stime for each in used)


if __name__ == "__main__":
    main()
