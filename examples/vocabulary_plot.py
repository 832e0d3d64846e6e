"""The picture of vocabulary_balance.py: the time of a step, and the memory of every rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, LogLocator

COLORS = {"baseline": "#b2443c", "redistribute": "#d99a2b", "vocab-2": "#2a6f97"}
IDEAL = "#8a8a8a"
NEAR = 0.08  # of the fullest rank: labels closer than that share one


@dataclass(frozen=True)
class Found:
    """One model divided in one way: seconds of a step, bytes of each rank.

    `ideal` are the seconds if the work of the baseline were dealt out evenly and no rank ever
    waited; `measured` those of real steps.
    """

    vocabulary: int
    way: str
    seconds: float
    ideal: float
    memory: tuple[int, ...]
    measured: float | None = None


def plot(found: Sequence[Found], title: str, path: Path) -> None:
    """Write the picture: time above, memory of each way below."""
    ways = list(dict.fromkeys(item.way for item in found))
    figure = Figure(figsize=(9, 7.2), layout="constrained")
    figure.suptitle(title)
    grid = figure.add_gridspec(2, len(ways), height_ratios=[3, 2])
    _time(figure.add_subplot(grid[0, :]), found, ways)
    first: Axes | None = None
    for column, way in enumerate(ways):
        axes = figure.add_subplot(grid[1, column], sharey=first)
        _memory(axes, [item for item in found if item.way == way], way)
        if first is None:
            axes.set_ylabel("memory of a rank (GiB)")
        else:
            axes.tick_params(labelleft=False)
        first = first or axes
    figure.savefig(path, dpi=150)


def _time(axes: Axes, found: Sequence[Found], ways: Sequence[str]) -> None:
    """Steps of all ways, and what ideal ones would take."""
    for way in ways:
        mine = [item for item in found if item.way == way]
        sizes, color = [item.vocabulary for item in mine], COLORS[way]
        axes.plot(sizes, [item.seconds for item in mine], marker="o", color=color, label=way)
        for item in mine:
            if item.measured is not None:
                axes.plot(item.vocabulary, item.measured, marker="D", ms=8, mfc="none", color=color)
    first = [item for item in found if item.way == ways[0]]
    sizes, ideal = [item.vocabulary for item in first], [item.ideal for item in first]
    axes.plot(sizes, ideal, "--", color=IDEAL, label="ideal: even, never idle")
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(EngFormatter(unit="s"))
    axes.set_ylabel("time of a step, predicted")
    _words(axes, [item.vocabulary for item in first])
    handles, labels = axes.get_legend_handles_labels()
    if any(item.measured is not None for item in found):
        handles.append(Line2D([], [], marker="D", ms=8, mfc="none", ls="", color="black"))
        labels.append("measured")
    axes.legend(handles, labels, frameon=False)


def _memory(axes: Axes, mine: Sequence[Found], way: str) -> None:
    """A line for each rank between the emptiest and the fullest."""
    sizes, color = [item.vocabulary for item in mine], COLORS[way]
    memory = [[size / 2**30 for size in item.memory] for item in mine]
    least, most = [min(ranks) for ranks in memory], [max(ranks) for ranks in memory]
    axes.fill_between(sizes, least, most, color=color, alpha=0.15, lw=0)
    for rank in zip(*memory, strict=True):
        axes.plot(sizes, rank, marker=".", color=color, lw=1)
    for ranks, height in _together(memory[-1]):
        names = "all ranks" if len(ranks) == len(memory[-1]) else f"rank {_listed(ranks)}"
        axes.annotate(
            names, (sizes[-1], height), xytext=(5, 0), textcoords="offset points",
            va="center", fontsize=8, color=color,
        )  # fmt: skip
    axes.set_title(way, color=color)
    _words(axes, sizes)
    axes.set_xlim(right=sizes[-1] * (sizes[-1] / sizes[0]) ** 0.3)  # room for the labels


def _together(sizes: Sequence[float]) -> list[tuple[list[int], float]]:
    """Ranks whose labels would cover each other, and the largest size of each such group."""
    found: list[tuple[list[int], float]] = []
    for rank in sorted(range(len(sizes)), key=lambda r: -sizes[r]):
        if found and found[-1][1] - sizes[rank] < NEAR * max(sizes):
            found[-1][0].append(rank)
        else:
            found.append(([rank], sizes[rank]))
    return found


def _listed(ranks: Sequence[int]) -> str:
    """Numbers in order."""
    return ", ".join(map(str, sorted(ranks)))


def _words(axes: Axes, sizes: Sequence[int]) -> None:
    """The axis of vocabularies, in thousands of words."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [_short(size) for size in sizes], fontsize=9)
    axes.minorticks_off()
    axes.set_xlabel("words in the vocabulary")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _short(size: int) -> str:
    """65536 as 64k."""
    return str(size) if size % 1024 else f"{size // 1024}k"
