"""`calibrate`: measures the machine that it runs on, alone or as one of torchrun's processes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from parcompiler.cli import options, output, words
from parcompiler.cli.faults import DONE, Settings

if TYPE_CHECKING:
    from parcompiler.device import Device


@click.command("calibrate", short_help="Measure this machine, as a device for plans.")
@click.option(
    "--output", "path", type=options.PATH, required=True, metavar="FILE",
    help="The device file, for --device FILE and pc.Mesh(device=FILE). What is measured is kept "
    "beside it at once, in FILE.measurements.jsonl.",
)  # fmt: skip
@click.option(
    "--like", type=words.DEVICE,
    help="The device whose figures stand for what is not measured, such as links where one "
    "process runs. Default: the device of the catalogue that this is.",
)  # fmt: skip
@click.option(
    "--name", metavar="NAME", help="The device's name. Default: that of the device it is, measured."
)
@click.option(
    "--dtypes", type=words.NAMES,
    help="What to multiply, such as float32,bfloat16. Default: all that the device is made for.",
)  # fmt: skip
@click.option(
    "--threads", type=options.COUNT, default=1, show_default=True, metavar="N",
    help="Threads of a rank on a CPU.",
)  # fmt: skip
@click.option(
    "--seconds", type=click.FloatRange(min=0, max=600, min_open=True), default=0.2,
    show_default=True, metavar="S", help="About how long each measurement takes.",
)  # fmt: skip
@click.option(
    "--sizes", type=options.COUNT, metavar="N",
    help="Measure only the N smallest sizes of each kind. Default: all that are quick enough.",
)  # fmt: skip
@click.option("--fresh", is_flag=True, help="Forget what was measured before; measure all anew.")
@options.common
@click.pass_obj
def calibrate_command(
    settings: Settings, /, path: Path, like: str | None, name: str | None,
    dtypes: tuple[str, ...] | None, threads: int, seconds: float, sizes: int | None, fresh: bool,
    form: str,
) -> int:  # fmt: skip
    """Measure this machine, and write what it can do as a device file.

    Matrix products, attention, convolutions, copies and small operators, by size and dtype; some
    minutes. Interrupted, it keeps what it has measured, and the same command goes on from there.
    Started by torchrun, it measures messages and collectives between the processes too.

    \b
    parcompiler calibrate --output mine.json
    parcompiler plan model.py:make --mesh pipeline=4 --device mine.json

    \b
    torchrun --nproc-per-node 8 -m parcompiler calibrate --output mine.json
    """
    if os.environ.get("RANK", "0") == "0":  # the one that writes
        output.check_files(path)
    from parcompiler.calibrate import calibrate

    with output.result_only():
        device = calibrate(
            path, name=name, like=like, dtypes=dtypes, threads=threads, seconds=seconds,
            sizes=sizes, fresh=fresh, progress=not settings.quiet,
        )  # fmt: skip
    if device is None:  # another rank than the first: that one says it all
        return DONE
    text = f"{summary(device)}\n\n{path}: take it with --device {path}, or pc.Mesh("
    text += f"device={str(path)!r})"
    output.result(form, lambda: text, lambda: json.loads(device.to_json()))
    return DONE


def summary(device: Device) -> str:
    """The figures of a device, each with where it is from."""
    from parcompiler.report.units import BYTES, FLOPS, SECONDS, quantity

    rows = [
        (f"peak, {name}", f"{quantity(peak, FLOPS)}FLOP/s", f"flops.{name}")
        for name, peak in device.flops
    ]
    rows += [
        ("memory", quantity(device.memory, BYTES), "memory"),
        ("memory bandwidth", _rate(device.memory_bandwidth), "memory_bandwidth"),
        ("launch of a kernel", quantity(device.launch_overhead, SECONDS), "launch_overhead"),
    ]
    for place, link in (("link", device.link), ("network", device.network)):
        rows.append((f"{place}, bandwidth", _rate(link.bandwidth), f"{place}.bandwidth"))
        rows.append((f"{place}, latency", quantity(link.latency, SECONDS), f"{place}.latency"))
    sources = dict(device.sources)
    lines = (
        f"  {name:20}{value:>16}  {_origin(sources.get(figure, ''))}".rstrip()
        for name, value, figure in rows
    )
    return "\n".join([device.name, *lines])


def _origin(source: str) -> str:
    """A source in short; the file has all of it.

    >>> _origin("measured on one core: the longest copy"), _origin("not measured, as cpu: chosen")
    ('measured', 'not measured, as cpu')
    """
    return "measured" if source.startswith("measured ") else source.partition(":")[0]


def _rate(bandwidth: float) -> str:
    """Bytes a second, in powers of ten as data sheets have them.

    >>> _rate(3.35e12)
    '3,350 GB/s'
    """
    return f"{bandwidth / 1e9:,.{0 if bandwidth >= 1e11 else 1}f} GB/s"
