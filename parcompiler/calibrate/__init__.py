"""Measures the machine that it runs on, and writes a device file."""

from parcompiler.calibrate.measure import calibrate

__all__ = ["calibrate"]
