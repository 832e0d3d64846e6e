"""The proof on the user's machine: every rank beside the original model, on the same batch.

    original model, one process, micro-batch after micro-batch ─┐
      reference.py, synchronized.py                             ├─ comparison.py: loss, gradients,
    the exported program, one process per rank ─────────────────┘  parameters after a step
      pool.py, rank_process.py

The entry is `program.verify()`, which calls `check.check`. This file imports nothing, because
processes that run ranks start faster without the model's half.
"""
