"""This machine as a bench: what measured `costs` run on it, beside blocks.

    passes of the vocabulary      on one rank's rows, by the runtime itself    (vocabulary.py)
    blocks with compiled layers   as the runtime compiles them                 (compiled.py)
    what tensor ranks exchange    among processes that are busy between        (local.py, busy.py)

Loading it loads nothing: `busy` is what the processes need.
"""
