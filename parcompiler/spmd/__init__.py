"""How each operator may be split over the ranks of one mesh axis.

placement     R, I, S(d), P: what each rank holds of a value and of its gradient
conversions   from one placement to another: collectives, bytes
formula       the notation of rules
rules         the strategies of a node: written, or discovered by execution
rows          rows of causal attention, which context ranks have zigzag
sorting       rows by expert, which each context rank sorts for itself
special       strategies that compute something else than the operator
simulate      the proof of a strategy on simulated ranks
shard         a graph and a strategy for each node -> the graph of one rank
"""

from parcompiler.spmd.placement import I, P, Placement, R, S
from parcompiler.spmd.rules import strategies
from parcompiler.spmd.strategy import SizeArgument, Strategy

__all__ = ["I", "P", "Placement", "R", "S", "SizeArgument", "Strategy", "strategies"]
