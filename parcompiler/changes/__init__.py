"""Two plans compared: what changed, in words, and what it does to time and memory.

comparison.py ── words.py   which fields differ
       └──────── side.py    what the plans are, and their predicted time and memory
"""

from parcompiler.changes.comparison import Comparison
from parcompiler.changes.side import Figures, Side, read, written
from parcompiler.changes.words import Change, changes

__all__ = ["Change", "Comparison", "Figures", "Side", "changes", "read", "written"]
