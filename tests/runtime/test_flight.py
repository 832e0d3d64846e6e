"""The recorder knows the last instructions of a rank, whether it waits, and in whose code it is."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path

import torch

from parcompiler.instruction import Instruction
from parcompiler.runtime import flight
from parcompiler.runtime.collective_queue import Receipt
from parcompiler.runtime.flight import FlightRecorder, Position

FORWARD = Instruction.parse("FORWARD stage 0 mb 1")
RECV = Instruction.parse("RECV h mb 1 from 0")


class Work:
    """A message that comes when it is told to."""

    def __init__(self) -> None:
        self.comes = threading.Event()

    def wait(self) -> None:
        self.comes.wait()


def position_of_thread(recorder: FlightRecorder, run: object) -> tuple[Position, threading.Thread]:
    """Where a thread is that calls `run`, once it has stayed there for a while."""

    def call() -> None:
        recorder.call("call 1 (step)")
        recorder.note(FORWARD)
        run()  # type: ignore[operator]

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    time.sleep(0.2)
    recorder.position()
    time.sleep(0.1)
    return recorder.position(), thread


def test_a_thread_that_waits_for_others_is_told_from_one_that_computes() -> None:
    recorder, work = FlightRecorder(), Work()
    position, thread = position_of_thread(recorder, Receipt(torch.ones(1), work).wait)  # type: ignore[arg-type]
    assert not position.waits  # `Work.wait` is not a backend's, but code of somebody else
    work.comes.set()
    thread.join()
    work = Work()
    receipt = Receipt(torch.ones(1), work.comes)  # type: ignore[arg-type]
    position, thread = position_of_thread(recorder, receipt.wait)
    assert position.waits
    assert str(position).startswith("waiting at 'FORWARD stage 0 mb 1' since ")
    assert 0.1 < position.seconds < 60
    work.comes.set()
    thread.join()


def test_a_wait_begins_when_the_thread_was_last_seen_to_compute() -> None:
    recorder, event = FlightRecorder(), threading.Event()
    looked, waiting = threading.Event(), threading.Event()

    def compute() -> None:
        looked.wait()  # in this file: the first looks are within
        waiting.set()
        Receipt(torch.ones(1), event).wait()  # type: ignore[arg-type]

    position, _ = position_of_thread(recorder, compute)
    assert not position.waits
    seen = time.time()
    looked.set()
    waiting.wait()
    for _ in range(500):  # while it is between these two lines
        if not position.waits:
            time.sleep(0.01)
            position = recorder.position()
    assert position.waits
    assert position.since >= seen - 0.1
    event.set()


def test_the_line_of_code_is_neither_the_runtime_s_nor_torch_s() -> None:
    recorder = FlightRecorder()
    event = threading.Event()
    position, _ = position_of_thread(recorder, lambda: event.wait(10))
    event.set()
    assert re.search(r"<lambda> \(test_flight.py:\d+\)$", position.code)
    assert not position.waits


def test_the_last_instructions_are_listed_and_older_ones_forgotten(tmp_path: Path) -> None:
    recorder = FlightRecorder(tmp_path / "new")
    for _ in range(flight.RECENT):
        recorder.note(FORWARD)
    recorder.note(RECV, awaited=True)
    assert recorder.current == RECV
    assert recorder.place == "at 'RECV h mb 1 from 0'"
    lines = str(recorder).splitlines()
    assert len(lines) == flight.RECENT
    assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d{6} +0\.\d{6}  FORWARD stage 0 mb 1", lines[0])
    assert lines[-1].endswith("  await RECV h mb 1 from 0")
    path = recorder.write(3, "a cause")
    assert path is not None and path == tmp_path / "new" / "rank_3.txt"
    text = path.read_text()
    assert text.startswith("rank 3, ")
    assert ": a cause\n" in text
    assert "in test_the_last_instructions_are_listed" in text
    recorder.call("call 2 (save)")
    assert recorder.place == "in call 2 (save)"


def test_what_cannot_be_written_is_left(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert FlightRecorder(tmp_path / "file").write(0, "a cause") is None
    assert FlightRecorder().write(0, "a cause") is None
