"""Proves a lowered program before anything runs: every rule, found again from the program alone.

Nothing here asks how the program was made. It is compared with the model's graph, so that a mistake
of a pass, of lowering, or of a plan edited by hand is found all the same.
"""

from parcompiler.verifier.fault import Fault
from parcompiler.verifier.memory_ledger import MemoryLimits
from parcompiler.verifier.verify import faults, verify

__all__ = ["Fault", "MemoryLimits", "faults", "verify"]
