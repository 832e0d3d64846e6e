"""The layers of the vocabulary in a graph, and the graph in which all ranks share them."""

from parcompiler.vocabulary.find import HeadMatch, LookupMatch, VocabularyMatch, find
from parcompiler.vocabulary.spread import spread

__all__ = ["HeadMatch", "LookupMatch", "VocabularyMatch", "find", "spread"]
