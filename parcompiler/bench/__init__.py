"""Measurements on this machine for measured `costs`, besides those of blocks.

    passes of the vocabulary      on one rank's rows, by the runtime itself    (vocabulary.py)
    blocks with compiled layers   as the runtime compiles them                 (compiled.py)
    exchanges of tensor ranks     among processes that compute between them    (local.py, busy.py)

This file imports nothing, as the processes need only `busy`.
"""
