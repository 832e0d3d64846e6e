"""What blocks and stages cost as expressions in the sizes of the captured model."""

from parcompiler.symbolic.costs import Costs
from parcompiler.symbolic.figures import StageFigures, StepFigures
from parcompiler.symbolic.forms import ClosedForms, Forms, closed_forms
from parcompiler.symbolic.readings import operator_of
from parcompiler.symbolic.resizable import ResizableGraph
from parcompiler.symbolic.sizes import (
    InputSize,
    Unfit,
    batch_of,
    capture_at,
    sample_at,
    sizes_of,
)

__all__ = [
    "ClosedForms",
    "Costs",
    "Forms",
    "InputSize",
    "ResizableGraph",
    "StageFigures",
    "StepFigures",
    "Unfit",
    "batch_of",
    "capture_at",
    "closed_forms",
    "operator_of",
    "sample_at",
    "sizes_of",
]
