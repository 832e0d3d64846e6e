"""Measures the machine that it runs on, and writes what it finds as a device file."""

from parcompiler.calibrate.measure import calibrate

__all__ = ["calibrate"]
