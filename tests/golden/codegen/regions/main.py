"""Start this rank of Regions: the script of this process's RANK.

    torchrun --nproc-per-node 2 main.py --steps 10

The rank scripts stand beside this file; README.md says who does what. Where it is imported, it has
the function `worker` of this rank's script.
"""

from pathlib import Path

from parcompiler.runtime import command_line, place, run, worker_of

here = place()  # as torchrun, srun or a PyTorchJob says
if here is None:
    command_line()  # --help needs no other ranks
    raise SystemExit("start this with torchrun --nproc-per-node 2 main.py")
rank, _ = here
if rank >= 2:
    raise SystemExit(f"this program has 2 ranks, there is no rank {rank}")
script = Path(__file__).parent / f"rank_{rank}.py"
worker = worker_of(script)
if __name__ == "__main__":
    run(worker)
