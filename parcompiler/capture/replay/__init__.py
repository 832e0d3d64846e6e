"""Layers that are equal are traced once or twice and copied for the rest, while a model is traced.

`torch.export` traces the layers of a list one by one, which takes nearly all of its time. Here the
list's members are told apart by what their forward may depend on (`alike`, `calls`); of those that
are equal two are traced, and the last, and where their nodes are equal, those of the others are
copies (`span`). What a forward reads and changes beside its arguments is watched (`watch`). Any
doubt, and the layer is traced; a difference where none may be, and the model is traced anew.

    layers.0   traced                   ─┐
    layers.1   traced, equal to it       │ the same graph as without, node for node
    layers.2 … layers.124   copied       │
    layers.125 traced, equal to it      ─┘

The one thing taken for granted is that a forward is no function of hidden state of the process
(a file, the clock) that changes for some layers in between and for none of those that are traced.
"""

from parcompiler.capture.replay.layers import Replay as Replay
from parcompiler.capture.replay.layers import replaying as replaying
