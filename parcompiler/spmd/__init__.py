"""How each operator may be split over the ranks of one mesh axis.

placement     R, I, S(d), P: the part of a value and of its gradient on each rank
conversions   from one placement to another: collectives, bytes
formula       the notation of rules
rules         the strategies of a node: written, or discovered by execution
rows          rows of causal attention, dealt zigzag to context ranks
sorting       rows by expert, sorted by each context rank for itself
special       strategies whose local call is another computation
simulate      runs a strategy on simulated ranks, to check it
shard         a graph and a strategy for each node -> the graph of one rank
"""

from parcompiler.spmd.placement import I, P, Placement, R, S
from parcompiler.spmd.rules import strategies
from parcompiler.spmd.strategy import SizeArgument, Strategy

__all__ = ["I", "P", "Placement", "R", "S", "SizeArgument", "Strategy", "strategies"]
