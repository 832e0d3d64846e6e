"""What blocks and stages cost as expressions in the sizes of the captured model."""

from parcompiler.symbolic.again import capturing, sample_at
from parcompiler.symbolic.costs import Costs
from parcompiler.symbolic.figures import Figures, StageFigures
from parcompiler.symbolic.forms import Forms
from parcompiler.symbolic.reading import Unfit
from parcompiler.symbolic.resizable import ResizableGraph, batch_of
from parcompiler.symbolic.search import ClosedForms, closed_forms
from parcompiler.symbolic.sizes import Size, sizes_of

__all__ = [
    "ClosedForms",
    "Costs",
    "Figures",
    "Forms",
    "ResizableGraph",
    "Size",
    "StageFigures",
    "Unfit",
    "batch_of",
    "capturing",
    "closed_forms",
    "sample_at",
    "sizes_of",
]
