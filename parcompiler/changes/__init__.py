"""Two plans compared: what changed, in words, and what it does to time and memory.

comparison.py ── words.py (moved.py, pieces.py)    which decisions differ
       └──────── side.py ── figures.py, sense.py   what the plans are, and what they come to
"""

from parcompiler.changes.comparison import Comparison
from parcompiler.changes.figures import Figures
from parcompiler.changes.side import Side, read, written
from parcompiler.changes.words import Change, changes

__all__ = ["Change", "Comparison", "Figures", "Side", "changes", "read", "written"]
