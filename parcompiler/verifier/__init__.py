"""Verifies a lowered program before anything runs: every rule is derived from the program alone.

It does not depend on how the program was made. The program is compared with the model's graph, so
that mistakes of passes, of lowering, and of hand-edited plans are all found.
"""

from parcompiler.verifier.fault import Fault
from parcompiler.verifier.memory_ledger import MemoryLimits
from parcompiler.verifier.verify import faults, verify

__all__ = ["Fault", "MemoryLimits", "faults", "verify"]
