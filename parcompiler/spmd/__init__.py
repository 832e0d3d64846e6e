"""How each operator may be split over the ranks of one mesh axis.

placement    R, I, S(d), P: how a value and its gradient stand
conversions  from one to another: collectives, bytes
rules        the strategies of a node: written, or discovered by execution
simulate     the proof of a strategy on simulated ranks
"""

from parcompiler.spmd.placement import I, P, Placement, R, S
from parcompiler.spmd.rules import source, strategies
from parcompiler.spmd.strategy import Size, Strategy

__all__ = ["I", "P", "Placement", "R", "S", "Size", "Strategy", "source", "strategies"]
