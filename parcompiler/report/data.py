"""The parts of a report: plain frozen values, so that a report can be stored and read without
torch.

Sizes are bytes, times seconds, work FLOPs (a multiplication with its addition counts 2). Names are
the model's own, unescaped: renderers must escape them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from parcompiler.passes.zero import DataShare
from parcompiler.plan import Plan
from parcompiler.report.events import MeasuredStep, Trail

VERSION = 2


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """The model. `parameters` counts elements, tied ones once and buffers not at all.

    `frozen` counts those that are not trained, `dtype` is the one of most elements; `random` says
    whether an operator draws random numbers. `evaluating` are the outermost modules that were in
    evaluation mode at capture ("" is the model itself); in training, `dropouts` of the modules in
    them would drop elements, and `norms` would update running statistics. `attention` has the forms
    that the compiler chose for attention; `row_gradients` is set if gradients of tables are rows.
    `templates` counts the distinct blocks.
    """

    name: str
    parameters: int
    parameter_bytes: int
    frozen: int
    dtype: str
    random: bool
    evaluating: tuple[str, ...] = ()
    dropouts: int = 0
    norms: int = 0
    attention: tuple[AttentionForm, ...] = ()
    templates: int = 0
    row_gradients: RowGradients | None = None


@dataclass(frozen=True, slots=True)
class RowGradients:
    """`tables` with row gradients: a step looks up at most `looked_up` of their `rows`, on all data
    ranks."""

    tables: int
    looked_up: int
    rows: int


@dataclass(frozen=True, slots=True)
class AttentionForm:
    """A form in which `count` attentions are computed, other than in the model."""

    text: str
    count: int


@dataclass(frozen=True, slots=True)
class RankDevice:
    """The device of the ranks at a pipeline coordinate; `peak` is in FLOP/s."""

    name: str
    memory: int
    peak: float


@dataclass(frozen=True, slots=True)
class DeviceMesh:
    """The mesh. `memory` is one device's, of which plans keep the fraction `margin` free, `peak`
    its FLOP/s in the model's dtype.

    If pipeline coordinates have different devices, these are `devices`; then `memory` is the least
    of them, `peak` the mean.
    """

    pipeline: int
    data: int
    tensor: int
    device: str
    memory: int
    peak: float
    devices: tuple[RankDevice, ...] = ()
    margin: float = 0.0
    context: int = 1
    expert: int = 1

    @property
    def copies(self) -> int:
        """The number of ranks at each pipeline coordinate."""
        return self.data * self.context * self.tensor

    @property
    def replicas(self) -> str:
        """The ranks that have the same parameters, in words."""
        axes = {"data": self.data, "context": self.context}
        several = " and ".join(axis for axis, ranks in axes.items() if ranks > 1)
        return f"{self.data * self.context} {several or 'data'} ranks"

    @property
    def axes(self) -> dict[str, int]:
        """The ranks along each axis; context and expert ranks only if there are several."""
        degrees = {"pipeline": self.pipeline, "data": self.data}
        degrees |= {"context": self.context} if self.context > 1 else {}
        degrees |= {"tensor": self.tensor}
        return degrees | ({"expert": self.expert} if self.expert > 1 else {})

    @property
    def counted(self) -> str:
        """The number of ranks with each device, along the pipeline."""
        names = [one.name for one in self.devices] or [self.device] * self.pipeline
        return ", ".join(f"{self.copies * len([*same])} × {name}" for name, same in groupby(names))

    def limit(self, rank: int) -> int:
        """The memory of a rank of the pipeline."""
        return self.devices[rank].memory if self.devices else self.memory


@dataclass(frozen=True, slots=True)
class VocabularyTable:
    """A table [size, width] of the vocabulary, of which every rank has `own` rows.

    `uses` are "embedding", "head" or both.
    """

    name: str
    uses: tuple[str, ...]
    size: int
    width: int
    own: int


@dataclass(frozen=True, slots=True)
class NamedTime:
    """The seconds of a part: of the busiest rank's step; or of a pass of the vocabulary, or of its
    collective, for one micro-batch."""

    name: str
    seconds: float


@dataclass(frozen=True, slots=True)
class VocabularySplit:
    """Every rank's part of the layers of the vocabulary.

    `state` are bytes on each rank: rows, their gradients and optimizer states.
    """

    tables: tuple[VocabularyTable, ...] = ()
    passes: tuple[NamedTime, ...] = ()
    state: int = 0


@dataclass(frozen=True, slots=True)
class TensorCollective:
    """A collective of the ranks of an axis in each of `blocks` blocks, for a micro-batch or `once`.

    It exchanges `value`, of `shape` on a rank; each rank sends `sent` bytes. It takes `seconds`, of
    which `exposed` are not hidden by compute. Gradients of parameters that ranks use for parts of
    the work are exchanged once a step.
    """

    template: str
    blocks: int
    action: str
    value: str
    shape: tuple[int, ...]
    sent: int
    backward: bool
    once: bool = False
    seconds: float = 0.0
    exposed: float = 0.0
    axis: str = "tensor"


@dataclass(frozen=True, slots=True)
class RowShare:
    """An input whose `rows` in every sample are split evenly over context ranks: `own` on each."""

    key: str
    rows: int
    own: int
    zigzag: bool = False  # half of them from either end


@dataclass(frozen=True, slots=True)
class PredictedStep:
    """The predicted step. `flops` are those of all ranks, without anything computed twice.

    `ideal` is the time with even stages, no idle time and free messages, `idle` the mean over
    ranks, `imbalance` the largest time of a rank over the mean, `mfu` the model's FLOPs over the
    peak of all ranks in that time. `rows` and `tokens` of a step are None if the inputs do not
    tell. `parts` are those of the busiest rank's step, `changes` the options that would shorten it
    most. `period` is the time from one step to the next if no rank waits for all others at its end.
    """

    seconds: float
    ideal: float
    idle: float
    imbalance: float
    flops: float
    mfu: float
    rows: int | None
    tokens: int | None
    period: float = 0.0
    parts: tuple[NamedTime, ...] = ()
    changes: tuple[OptionGain, ...] = ()


@dataclass(frozen=True, slots=True)
class SourceLine:
    """The time of a line of the model's source for one micro-batch in a block: `place` is its file
    and number, `share` its fraction of the compute of all blocks, over all blocks of its template,
    and `bound` what takes most of that."""

    template: str
    blocks: int
    place: str
    text: str
    forward: float
    backward: float
    share: float
    bound: str


@dataclass(frozen=True, slots=True)
class OptionGain:
    """An option and the `value` with which a step would take `seconds`: `gain` is the relative
    increase of samples per second."""

    option: str
    value: str
    gain: float
    seconds: float


@dataclass(frozen=True, slots=True)
class StageSummary:
    """A stage and its costs for one micro-batch.

    `state` are the bytes of its parameters with gradients, optimizer states and older versions,
    `activations` those that one micro-batch keeps for the backward; `in_flight` micro-batches are
    kept at once. `sent` are the bytes of values sent to other ranks, `sent_back` those of gradients
    of received values.
    """

    rank: int
    blocks: tuple[str, ...]
    parameters: int
    parameter_bytes: int
    forward_flops: float
    backward_flops: float
    forward: float
    backward: float
    state: int
    activations: int
    in_flight: int
    sent: int
    sent_back: int


@dataclass(frozen=True, slots=True)
class Stale:
    """A stage of an asynchronous schedule: its weights may be `updates` updates old.

    It holds `versions` versions of them at once; those besides the current one take `nbytes`.
    """

    updates: int
    versions: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Rank:
    """A rank: the idle fraction of the step, and the peak memory; of that, the bytes of parameters,
    gradients and optimizer states.

    `without` are the bytes that it would need without recomputation and offloading, `host` those of
    offloaded blocks in its host's memory.
    """

    idle: float
    peak_memory: int
    parameters: int = 0
    gradients: int = 0
    states: int = 0
    without: int | None = None
    host: int = 0


@dataclass(frozen=True, slots=True)
class OwnedParameters:
    """The parameters that the optimizer updates whole on data rank `data` of a rank: `nbytes` in
    all, the largest first."""

    rank: int
    data: int
    nbytes: int
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SentValue:
    """A tensor sent from stage `source` directly to the stages `targets`, for each micro-batch."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    gradient: bool
    source: int
    targets: tuple[int, ...]
    cheaper: bool
    """Whether stages could compute it themselves, but receiving it is faster."""


@dataclass(frozen=True, slots=True)
class Recomputed:
    """A value that stages compute themselves instead of receiving it: for each micro-batch, or
    `once`."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    stages: tuple[int, ...]
    once: bool = False


@dataclass(frozen=True, slots=True)
class SharedTensor:
    """A parameter with several names or several users. If there are several ranks, they sum its
    gradients."""

    name: str
    aliases: tuple[str, ...]
    nbytes: int
    blocks: tuple[str, ...]
    stages: tuple[int, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Averaged:
    """Gradients that a rank sums with its data replicas: `sums` sums of `nbytes` take `seconds` in
    all.

    The last one ends `exposed` seconds after the last compute instruction of all ranks.
    """

    sums: int
    nbytes: int
    seconds: float
    exposed: float


@dataclass(frozen=True, slots=True)
class Estimated:
    """An operator that could not run without data, so that its cost is a guess from shapes."""

    operator: str
    templates: tuple[str, ...]
    blocks: int


@dataclass(frozen=True, slots=True)
class Symbol:
    """A letter of the closed forms: the size that it stands for, and its number at capture; or,
    with an empty `letter`, the reason why a size is no symbol."""

    letter: str
    word: str
    now: int | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Form:
    """A cost of a block of a template, or of all blocks of a stage, for one micro-batch on a rank:
    `what` is counted, and `value` is the sympy expression."""

    name: str
    blocks: int
    what: str
    value: str


@dataclass(frozen=True, slots=True)
class ReportData:
    """A plan, and all figures of its report. `levels` are those of ZeRO with its stages, `experts`
    the numbers of experts that expert ranks share out, `server` the bytes through a parameter
    server's link in a step, and those of its states."""

    plan: Plan
    model: TrainedModel
    mesh: DeviceMesh
    step: PredictedStep
    stages: tuple[StageSummary, ...]
    ranks: tuple[Rank, ...]
    values: tuple[SentValue, ...]
    recomputed: tuple[Recomputed, ...]
    shared: tuple[SharedTensor, ...]
    unread: tuple[str, ...]
    estimated: tuple[Estimated, ...]
    trail: Trail
    measurement: MeasuredStep | None = None
    staleness: tuple[Stale, ...] = ()
    averaged: tuple[Averaged, ...] = ()
    exchanged: tuple[TensorCollective, ...] = ()
    rows: tuple[RowShare, ...] = ()
    experts: tuple[int, ...] = ()
    vocabulary: VocabularySplit | None = None
    levels: tuple[DataShare, ...] = ()
    owned: tuple[OwnedParameters, ...] = ()
    symbols: tuple[Symbol, ...] = ()
    forms: tuple[Form, ...] = ()
    lines: tuple[SourceLine, ...] = ()
    server: tuple[int, ...] = ()
    version: int = VERSION

    @property
    def fullest(self) -> tuple[int, float]:
        """The rank with the least free memory, and the fraction of its memory in use."""
        used = [rank.peak_memory / self.mesh.limit(r) for r, rank in enumerate(self.ranks)]
        rank = max(range(len(used)), key=used.__getitem__)
        return rank, used[rank]
