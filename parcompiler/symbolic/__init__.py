"""What blocks and stages cost as expressions in the sizes of the captured model."""

from parcompiler.symbolic.again import capturing
from parcompiler.symbolic.costs import Costs
from parcompiler.symbolic.figures import Figures, StageFigures
from parcompiler.symbolic.forms import Forms
from parcompiler.symbolic.search import ClosedForms, closed_forms
from parcompiler.symbolic.sizes import Size, sizes_of

__all__ = [
    "ClosedForms",
    "Costs",
    "Figures",
    "Forms",
    "Size",
    "StageFigures",
    "capturing",
    "closed_forms",
    "sizes_of",
]
