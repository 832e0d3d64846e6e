"""Rank 3 of 4: stage 1 of GPT, data coordinate 1 of 2.

It runs `rank_2.py`, exchanges values with rank 1, sums gradients over ranks 2, 3 and 0 … 3.

Started by `torchrun --nproc-per-node 4 main.py` as the process with RANK=3.
"""

from parcompiler.runtime import run

from rank_2 import worker

if __name__ == "__main__":
    run(worker)
