"""How much of a head's speed is left when it is split over p ranks?

    python benchmarks/vocabulary_kernels/run.py [--fused] [--rounds 20]     one CUDA GPU, bf16
    python benchmarks/vocabulary_kernels/run.py --cpu                       one thread, float32
    python benchmarks/vocabulary_kernels/run.py --dry                       tiny, bf16, on the CPU

One shard's S and T against forward and backward of the whole head by autograd, divided by p. In
every round each variant runs once, in turn; the ratio is the median of those of the rounds. Times
on a CPU are those of this process alone.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from parcompiler import runtime
from parcompiler.runtime import head as passes
from parcompiler.runtime.head import combined, factors, loss, stacked

WARM = 3  # rounds that are not counted: memory and compilers
GPU = ((3072, 8), (4096, 16), (5120, 32))  # hidden sizes, and the ranks that go with them


@dataclass(frozen=True)
class Case:
    """A head."""

    classes: int
    hidden: int
    ranks: int
    tokens: int


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--fused", action="store_true", help="compile what is done to logits")
    parser.add_argument("--cpu", action="store_true", help="sizes for one thread of a CPU")
    parser.add_argument("--dry", action="store_true", help="tiny sizes on the CPU")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.cpu:
        cases = [Case(classes, 256, 2, 512) for classes in (65_536, 131_072)]
        device, dtype = torch.device("cpu"), torch.float32
    elif options.dry:
        cases = [Case(1000, hidden // 64, ranks, 32) for hidden, ranks in GPU]
        device, dtype = torch.device("cpu"), torch.bfloat16
    elif torch.cuda.is_available():
        cases = [Case(256_000, h, p, tokens) for h, p in GPU for tokens in (2048, 4096)]
        device, dtype = torch.device("cuda"), torch.bfloat16
        print(
            f"{torch.cuda.get_device_name()}, torch {torch.__version__}, fused: {options.fused}\n"
        )
    else:
        print("there is no CUDA GPU here; --cpu and --dry run without one")
        return
    columns = ("V", "h", "p", "tokens", "method", "whole / p (ms)", "S + T (ms)", "ratio")
    print(row(columns), row(["---"] * len(columns)), sep="\n")
    for case in cases:
        for line in measured(case, device, dtype, options.rounds, options.fused):
            print(row(line), flush=True)


def measured(
    case: Case, device: torch.device, dtype: torch.dtype, rounds: int, fused: bool
) -> list[list[str]]:
    """The lines of a case."""
    torch.manual_seed(0)
    x = torch.randn(case.tokens, case.hidden, dtype=dtype, device=device)
    labels = torch.randint(case.classes, (case.tokens,), device=device)
    variants = {
        "whole": whole(case, x, labels),
        "vocab-1": shard(case, x, labels, "vocab-1", fused),
        "vocab-2": shard(case, x, labels, "vocab-2", fused),
    }
    times: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(WARM + rounds):
        for name, run in variants.items():
            taken = timed(run, device)
            if number >= WARM:
                times[name].append(taken)
    ideal = [one / case.ranks for one in times["whole"]]
    found = []
    for method in ("vocab-1", "vocab-2"):
        ratio = statistics.median(a / b for a, b in zip(ideal, times[method], strict=True))
        numbers = (statistics.median(ideal) * 1e3, statistics.median(times[method]) * 1e3)
        sizes = (case.classes, case.hidden, case.ranks, case.tokens)
        found.append([*map(str, sizes), method, *(f"{n:.2f}" for n in numbers), f"{ratio:.3f}"])
    return found


def whole(case: Case, x: torch.Tensor, labels: torch.Tensor) -> Callable[[], None]:
    """Forward and backward of the head, as a user writes it."""
    weight = nn.Parameter(torch.randn(case.classes, case.hidden, dtype=x.dtype, device=x.device))
    weight.data.mul_(0.02)
    leaf = x.clone().requires_grad_()

    def run() -> None:
        weight.grad = leaf.grad = None
        F.cross_entropy(F.linear(leaf, weight), labels).backward()

    return run


def shard(
    case: Case, x: torch.Tensor, labels: torch.Tensor, method: str, fused: bool
) -> Callable[[], None]:
    """S and T of the first rank, and its part of the gradient of x; nothing is exchanged."""

    class Rows(runtime.Vocabulary):
        size = {"weight": case.classes}  # noqa: RUF012 (an emitted class)
        head = runtime.Head("x", "weight", ("labels",))

    with torch.device(x.device):
        vocabulary = Rows(case.ranks, 0)
        rows = runtime.rows(case.classes, case.hidden, ranks=case.ranks, dtype=x.dtype)
        vocabulary.weight = nn.Parameter(rows.normal_(std=0.02))
    own, room = passes.rows_of_head(vocabulary, fused=fused), passes.MatrixPool()

    def run() -> None:
        own.weight.grad = None
        part = passes.products(own, x, passes.labels_of(own, labels), room)
        passes.normalize(own, part)
        if method == "vocab-2":
            passes.weigh(own, part)
        assert part.statistics is not None
        told = combined(stacked(part.statistics).unsqueeze(0))
        loss(own.head, own.classes, part.labels, told)
        found = factors(own.head, own.classes, part.labels, part.statistics, told, 1.0)
        if method == "vocab-1":
            passes.weigh(own, part)
        passes.input_gradient(own, part, found)
        passes.weight_gradient(own, part, found)
        room.give(part.powers)

    return run


def timed(run: Callable[[], None], device: torch.device) -> float:
    """Seconds of one run."""
    if device.type == "cpu":
        begin = time.process_time()
        run()
        return time.process_time() - begin
    torch.cuda.synchronize()
    begin = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def row(cells: Sequence[str]) -> str:
    """A line of a table."""
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
