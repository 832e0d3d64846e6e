"""Compares two plans: their differences in words, and the effect on time and memory.

differences.py ── side.py   reads the plans, and their predicted time and memory
"""

from parcompiler.changes.differences import Change, Comparison, changes
from parcompiler.changes.side import Prediction, Side, read, written

__all__ = ["Change", "Comparison", "Prediction", "Side", "changes", "read", "written"]
