"""The passes, one decision a file, in the order in which `compile` runs them."""

from parcompiler.passes.base import Pass
from parcompiler.passes.order import OrderPass
from parcompiler.passes.recompute import RecomputePass
from parcompiler.passes.schedule import SchedulePass
from parcompiler.passes.shard import ShardPass
from parcompiler.passes.stage import StagePass
from parcompiler.passes.vocabulary import VocabularyPass

DEFAULT: tuple[Pass, ...] = (
    VocabularyPass(), ShardPass(), RecomputePass(), SchedulePass(), StagePass(), OrderPass(),
)  # fmt: skip

__all__ = [
    "DEFAULT", "OrderPass", "Pass", "RecomputePass", "SchedulePass", "ShardPass", "StagePass",
    "VocabularyPass",
]  # fmt: skip
