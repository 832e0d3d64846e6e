"""Two plans compared: what changed, in words, and what it does to time and memory.

differences.py ── side.py   what the plans are, and their predicted time and memory
"""

from parcompiler.changes.differences import Change, Comparison, changes
from parcompiler.changes.side import Prediction, Side, read, written

__all__ = ["Change", "Comparison", "Prediction", "Side", "changes", "read", "written"]
