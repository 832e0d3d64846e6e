"""Who should hold a large vocabulary? The same GPT with ever more words, divided in three ways.

    python examples/vocabulary_balance.py                    (seconds: nothing is trained)
    python examples/vocabulary_balance.py --ranks 2 --device h100
    python examples/vocabulary_balance.py --ranks 2 --measure 32768    (a few real steps, too)

    baseline        as many layers on every rank, embedding and head on the first and the last
    redistribute    layers moved away from the ranks that have embedding and head
    vocab-2         rows of the embedding and of the head on every rank

The models are on the meta device: no parameter is ever made. `--measure` trains one of them on
processes of this machine and puts the time of a step beside the predicted one.
"""

import argparse
import dataclasses
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from training import launch
from vocabulary_plot import Found, plot

import parcompiler as pc
from parcompiler.models import gpt

CONFIG = gpt.Config(layers=8, heads=4, hidden=256, vocabulary=1, sequence=256, tied=False)
WAYS = {  # how the vocabulary is computed, and how the layers are dealt to the stages
    "baseline": ("whole", "even"),
    "redistribute": ("whole", "auto"),
    "vocab-2": ("vocab-2", "auto"),
}
ROWS, WARM = 2, 1  # of one micro-batch; steps that are not counted


def divided(
    model: gpt.GPT, ranks: int, microbatches: int, device: str
) -> Iterator[tuple[str, pc.Program]]:
    """The model compiled each way, and captured once."""
    tokens = torch.zeros(ROWS, model.config.sequence, dtype=torch.long)
    inputs = {"tokens": tokens, "labels": tokens}
    captured = pc.compile(model, pc.Mesh(device=device), inputs, progress=False)
    for name, (vocabulary, stages) in WAYS.items():
        program = pc.compile(
            captured,
            pc.Mesh(pipeline=ranks, device=device),
            microbatches=microbatches,
            schedule="1f1b",
            vocabulary=vocabulary,
            stages=stages,
            recompute="none",
            progress=False,
        )
        yield name, program


def predicted(options: argparse.Namespace) -> Iterator[Found]:
    """What the simulator says of every vocabulary and way."""
    for size in options.vocabularies:
        with torch.device("meta"):
            model = gpt.GPT(configured(options, size))
        ideal = 0.0
        for way, program in divided(model, options.ranks, options.microbatches, options.device):
            step = program.simulate()
            ideal = ideal or program.report().step.ideal  # of the baseline, for all
            yield Found(size, way, step.step_time, ideal, tuple(step.peak_memory))


def configured(options: argparse.Namespace, size: int) -> gpt.Config:
    """The model with a vocabulary of this size."""
    return dataclasses.replace(
        CONFIG, layers=options.layers, sequence=options.sequence, vocabulary=size
    )


def measured(options: argparse.Namespace) -> dict[str, float]:
    """Seconds of a step on real ranks, by way: the median of a few."""
    torch.manual_seed(0)
    model = gpt.GPT(configured(options, options.measure))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for way, program in divided(model, options.ranks, options.microbatches, "cpu"):
            program.export(folder / way)
        rows, length = ROWS * options.microbatches, options.sequence
        tokens = torch.randint(options.measure, (rows, length + 1))
        torch.save({"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}, folder / "batch.pt")
        launch(__file__, options.ranks, "--steps", str(options.steps), "--folder", name)
        found: dict[str, float] = json.loads((folder / "seconds.json").read_text())
    return found


def train(folder: Path, steps: int) -> None:
    """This process's rank of the programs in `folder`, which take steps in turn."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    batch = torch.load(folder / "batch.pt")
    workers = {way: pc.load(folder / way).worker() for way in WAYS}
    for worker in workers.values():
        worker.set_optimizer(torch.optim.AdamW, lr=1e-3)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(WARM + steps):
        for way, worker in workers.items():
            start = time.perf_counter()
            worker.train_step(batch)
            seconds[way].append(time.perf_counter() - start)
    for worker in workers.values():
        worker.close()
    if dist.get_rank() == 0:
        found = {way: statistics.median(taken[WARM:]) for way, taken in seconds.items()}
        (folder / "seconds.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def table(found: Sequence[Found], ranks: int) -> Table:
    """Time and memory side by side."""
    real = any(item.measured is not None for item in found)
    headings = ["step\n(ms)", "of\nideal", *(["measured\n(ms)", "over\npredicted"] if real else [])]
    shown = Table(title="Predicted", title_justify="left")
    shown.add_column("words", justify="right")
    shown.add_column("vocabulary", no_wrap=True)
    for heading in (*headings, *(f"rank {rank}\n(MiB)" for rank in range(ranks))):
        shown.add_column(heading, justify="right", no_wrap=True)
    for item in found:
        cells = [f"{1e3 * item.seconds:,.1f}", f"{item.seconds / item.ideal:.2f}x"]
        if item.measured is not None:
            cells += [f"{1e3 * item.measured:,.1f}", f"{item.measured / item.seconds:.2f}x"]
        elif real:
            cells += ["", ""]
        memory = (f"{size / 2**20:,.0f}" for size in item.memory)
        ends = item.way == list(WAYS)[-1]
        shown.add_row(f"{item.vocabulary:,}", item.way, *cells, *memory, end_section=ends)
    return shown


def main() -> None:
    """Predict, draw, and perhaps measure; or, as one rank, train."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = [2**i for i in range(13, 19)]
    parser.add_argument("--vocabularies", nargs="+", type=int, default=sizes, help="words")
    parser.add_argument("--ranks", type=int, default=4, help="pipeline ranks")
    parser.add_argument("--microbatches", type=int, default=8, help=f"of {ROWS} rows, in a step")
    parser.add_argument("--layers", type=int, default=CONFIG.layers)
    parser.add_argument("--sequence", type=int, default=CONFIG.sequence, help="tokens of a row")
    parser.add_argument("--device", default="cpu", help="cpu, a100-80g, h100 ...")
    parser.add_argument("--plot", type=Path, default=Path("vocabulary_balance.png"))
    parser.add_argument("--measure", type=int, metavar="WORDS", help="train steps with so many")
    parser.add_argument("--steps", type=int, default=3, help="training steps of --measure")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # of a rank
    options = parser.parse_args()
    if "RANK" in os.environ and options.folder:
        train(options.folder, options.steps)
        return
    if options.measure:
        options.device = "cpu"
        options.vocabularies = sorted({*options.vocabularies, options.measure})
    found = list(predicted(options))
    if options.measure:
        real = measured(options)
        found = [
            dataclasses.replace(item, measured=real[item.way])
            if item.vocabulary == options.measure
            else item
            for item in found
        ]
    console = Console()
    console.width = max(console.width, 110)
    console.print(table(found, options.ranks))
    title = f"GPT, {options.layers} layers of {CONFIG.hidden}, {options.ranks} x {options.device}"
    plot(found, title, options.plot)
    print(f"plot: {options.plot}")


if __name__ == "__main__":
    main()
