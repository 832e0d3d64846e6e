"""The layers of the vocabulary in a graph, and the graph in which all ranks share them."""

from parcompiler.vocabulary.find import HeadMatch, VocabularyMatch, find
from parcompiler.vocabulary.spread import spread

__all__ = ["HeadMatch", "VocabularyMatch", "find", "spread"]
