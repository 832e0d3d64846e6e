"""Dynamic scaling of the loss, so that small gradients are not zero in float16.

The loss is multiplied by the scale before its backward, gradients are divided by it in float32.
When a gradient is not finite the step is skipped and the scale halved; after so many good steps in
a row it is doubled (Micikevicius et al. 2018, "Mixed Precision Training", arXiv:1710.03740, section
3.2; the numbers are those of `torch.amp.GradScaler`).

>>> scale = LossScale(8.0, interval=2)
>>> for good in (False, True, True, True):
...     scale.update(good)
>>> scale.value, scale.skipped
(8.0, 1)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from parcompiler.errors import InputError

GROWTH = 2.0
BACKOFF = 0.5
INTERVAL = 2000  # good steps in a row
INITIAL = 2.0**16


@dataclass
class LossScale:
    """The scale now, how many steps were good since it changed, and how many were skipped."""

    value: float = INITIAL
    interval: int = INTERVAL
    good: int = 0
    skipped: int = 0

    def set(self, value: float) -> None:
        """Go on from another scale. Raises InputError unless it is finite and positive."""
        if not (math.isfinite(value) and value > 0):
            message = f"the scale of the loss must be finite and positive ({value!r} given)"
            raise InputError(message)
        self.value, self.good = float(value), 0

    def update(self, finite: bool) -> None:
        """Take note of a step, whose gradients were `finite` or not."""
        if not finite:
            self.value, self.good = self.value * BACKOFF, 0
            self.skipped += 1
            return
        self.good += 1
        if self.good == self.interval:
            self.value, self.good = self.value * GROWTH, 0
