"""What blocks and stages cost as expressions in the sizes of the captured model."""

from parcompiler.symbolic.costs import Costs
from parcompiler.symbolic.figures import StepFigures
from parcompiler.symbolic.forms import ClosedForms, Forms, closed_forms
from parcompiler.symbolic.printed import forms_of, symbols_of
from parcompiler.symbolic.sizes import InputSize, Unfit, batch_of, sample_at, sizes_of

__all__ = [
    "ClosedForms",
    "Costs",
    "Forms",
    "InputSize",
    "StepFigures",
    "Unfit",
    "batch_of",
    "closed_forms",
    "forms_of",
    "sample_at",
    "sizes_of",
    "symbols_of",
]
