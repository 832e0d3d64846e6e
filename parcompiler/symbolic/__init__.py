"""What blocks and stages cost as expressions in the sizes of the captured model."""

from parcompiler.symbolic.costs import Costs
from parcompiler.symbolic.figures import StageFigures, StepFigures
from parcompiler.symbolic.forms import ClosedForms, Forms, closed_forms
from parcompiler.symbolic.sizes import InputSize, Unfit, batch_of, sample_at, sizes_of

__all__ = [
    "ClosedForms",
    "Costs",
    "Forms",
    "InputSize",
    "StageFigures",
    "StepFigures",
    "Unfit",
    "batch_of",
    "closed_forms",
    "sample_at",
    "sizes_of",
]
