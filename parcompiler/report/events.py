"""When what happened in a step: the events of the simulated one and of the measured one.

Seconds since the step began, and bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from parcompiler.errors import InputError
from parcompiler.instruction import Instruction, Kind


@dataclass(frozen=True, slots=True)
class Event:
    """An instruction of `rank` in the simulated step; `text` is the instruction.

    >>> Event.parse("0 0.5 1.5 FORWARD stage 0 mb 3").instruction.microbatch
    3
    """

    rank: int
    begin: float
    end: float
    text: str

    def __str__(self) -> str:
        """The line that `parse` reads."""
        return f"{self.rank} {self.begin!r} {self.end!r} {self.text}"

    @classmethod
    def parse(cls, line: str) -> Event:
        """Read one line. Raises InputError when it is none."""
        try:
            rank, begin, end, text = line.split(maxsplit=3)
            event = cls(int(rank), _second(begin), _second(end), text)
            if event.end < event.begin:
                raise ValueError
            _ = event.instruction
        except ValueError as error:
            message = f"an event reads 'rank begin end instruction' ({line[:60]!r} found)"
            raise InputError(message) from error
        return event

    @property
    def kind(self) -> Kind:
        """What the instruction does."""
        return Kind(self.text.split(maxsplit=1)[0])

    @property
    def instruction(self) -> Instruction:
        """The instruction."""
        return Instruction.parse(self.text)


@dataclass(frozen=True, slots=True)
class Ran:
    """An instruction of `rank` in a measured step, `waited` of its seconds for messages.

    >>> Ran.parse("0 0.5 1.5 0.25 FORWARD stage 0 mb 3").waited
    0.25
    """

    rank: int
    begin: float
    end: float
    waited: float
    text: str

    def __str__(self) -> str:
        """The line that `parse` reads."""
        return f"{self.rank} {self.begin!r} {self.end!r} {self.waited!r} {self.text}"

    @classmethod
    def parse(cls, line: str) -> Ran:
        """Read one line. Raises InputError when it is none."""
        try:
            rank, begin, end, waited, text = line.split(maxsplit=4)
            times = (_second(begin), _second(end), _second(waited))
        except ValueError as error:
            message = (
                f"a measured one reads 'rank begin end waited instruction' ({line[:60]!r} found)"
            )
            raise InputError(message) from error
        event = Event.parse(f"{rank} {begin} {end} {text}")
        return cls(event.rank, *times, event.text)

    @property
    def kind(self) -> Kind:
        """What the instruction does."""
        return Kind(self.text.split(maxsplit=1)[0])

    @property
    def instruction(self) -> Instruction:
        """The instruction."""
        return Instruction.parse(self.text)


@dataclass(frozen=True, slots=True)
class Level:
    """From `second` on a rank holds `nbytes`."""

    second: float
    nbytes: int

    def __str__(self) -> str:
        """The line that `parse` reads."""
        return f"{self.second!r} {self.nbytes}"

    @classmethod
    def parse(cls, line: str) -> Level:
        """Read one line. Raises InputError when it is none."""
        try:
            second, nbytes = line.split()
            return cls(_second(second), int(nbytes))
        except ValueError as error:
            message = f"a level of memory reads 'second bytes' ({line[:60]!r} found)"
            raise InputError(message) from error


@dataclass(frozen=True, slots=True)
class Trail:
    """The simulated step: events by their begin, and for each rank the levels of its memory."""

    events: tuple[Event, ...]
    memory: tuple[tuple[Level, ...], ...]


@dataclass(frozen=True, slots=True)
class Measured:
    """A real step: its seconds, and by stage the mean of its forwards and backwards, if known.

    `events` are its instructions by their begin, where they were recorded.
    """

    seconds: float
    forward: tuple[float | None, ...] = ()
    backward: tuple[float | None, ...] = ()
    events: tuple[Ran, ...] = ()


def _second(text: str) -> float:
    """A moment of the step. Raises ValueError when it is none."""
    second = float(text)
    if not 0 <= second < float("inf"):
        raise ValueError
    return second
