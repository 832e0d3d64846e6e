"""The layers of the vocabulary in a graph, and the graph in which all ranks share them."""

from parcompiler.vocabulary.find import find
from parcompiler.vocabulary.found import Found, FoundHead, FoundLookup, Whole
from parcompiler.vocabulary.spread import spread

__all__ = ["Found", "FoundHead", "FoundLookup", "Whole", "find", "spread"]
