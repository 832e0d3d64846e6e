"""From an ordinary `nn.Module` to a `Graph`, and from a graph to blocks."""

from parcompiler.capture.capture import capture

__all__ = ["capture"]
