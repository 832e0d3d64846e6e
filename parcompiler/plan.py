"""Every decision of the compiler, frozen, as JSON that a user can read, edit, diff and reuse.

One field per decision, `None` until a pass has decided it. Same inputs give the same bytes: no
times, paths or dates are in it.

>>> plan = Plan(model="GPT", fingerprint="0f", mesh=Shape(pipeline=2), microbatches=8)
>>> Plan.from_json(plan.to_json()) == plan
True
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from parcompiler import documents
from parcompiler.data_updates import DataUpdates
from parcompiler.errors import InputError
from parcompiler.mesh import AXES, Mesh

VERSION = 1


@dataclass(frozen=True, slots=True)
class Shape:
    """The degrees of the mesh and the name of its device, or those of each pipeline coordinate."""

    pipeline: int = 1
    tensor: int = 1
    data: int = 1
    device: str | tuple[str, ...] = "cpu"
    context: int = 1
    expert: int = 1

    @property
    def replicas(self) -> int:
        """The number of ranks that have the same parameters."""
        return self.data * self.context

    @property
    def devices(self) -> tuple[str, ...]:
        """The name of the device at each pipeline coordinate."""
        return (self.device,) * self.pipeline if isinstance(self.device, str) else self.device


@dataclass(frozen=True, slots=True)
class StageChoice:
    """The blocks of one stage, in order of execution, and the pipeline coordinate it runs on."""

    blocks: tuple[str, ...]
    rank: int


@dataclass(frozen=True, slots=True)
class Solution:
    """A solver's objective (seconds of the predicted step), its lower bound, and their gap."""

    status: str
    objective: float
    bound: float
    gap: float


@dataclass(frozen=True, slots=True)
class Weighed:
    """An alternative schedule: the seconds of its step, or the reason why it was not divided."""

    schedule: str
    virtual_stages: int
    seconds: float | None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Method:
    """A method for the vocabulary: seconds and bytes of its step, or the reason why it failed."""

    method: str
    schedule: str | None
    seconds: float | None
    memory: int | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class VocabularyChoice:
    """How the layers of the vocabulary are computed.

    "whole": on their stages. Otherwise all ranks hold rows of the tables of `lookups` and of `head`
    (their names in the model). `kept` are layers that stay whole, with the reason; `weighed` the
    methods that "auto" chose from, each with the most bytes on a rank.
    """

    method: str
    lookups: tuple[str, ...] = ()
    head: str | None = None
    kept: tuple[str, ...] = ()
    weighed: tuple[Method, ...] | None = None

    @property
    def spread(self) -> bool:
        """Whether any layer is on all ranks."""
        return self.method != "whole"


@dataclass(frozen=True, slots=True)
class TemplateTime:
    """Seconds of a template for one micro-batch; `weight` is the part of `backward` that can wait.

    `hidden` are the seconds of collectives that products for weights hide in a whole backward; they
    come on top of `backward` where its two parts run apart.
    """

    template: str
    forward: float
    backward: float
    weight: float
    hidden: float = 0.0


VOCABULARY_PASSES = ("s", "normalize", "t", "embed", "embed_backward")


@dataclass(frozen=True, slots=True)
class VocabularyTime:
    """Seconds of the passes of a spread vocabulary for one micro-batch on each rank.

    `method` is the one that they belong to; `embed` and `embed_backward` are of all embeddings
    together.
    """

    method: str
    s: float
    normalize: float
    t: float
    embed: float
    embed_backward: float


STAYS = "the micro-batch stays as it is given"  # the beginning of the reason


@dataclass(frozen=True, slots=True)
class MeshChoice:
    """A mesh of a cluster: the figures of its best plan, or the reason why none was made.

    `microbatches` are those of each data rank, of `rows` rows each (None: their tensors have no
    common number of rows). `seconds` of the step are, on average over ranks, the sum of `compute`,
    `exchange` (between tensor ranks, and of gradients after the last backward) and `idle`;
    `memory` is the most bytes on a rank. Where there is a `reason`, both are lower bounds, or None.
    `zero` is the level of ZeRO.
    """

    pipeline: int
    tensor: int
    data: int
    microbatches: int
    rows: int | None = None
    seconds: float | None = None
    memory: int | None = None
    schedule: str | None = None
    vocabulary: str | None = None
    recomputed: int = 0
    offload: bool = False
    compute: float | None = None
    exchange: float | None = None
    idle: float | None = None
    reason: str | None = None
    zero: int | None = None
    context: int = 1
    expert: int = 1

    @property
    def degrees(self) -> str:
        """The degrees in one line, those of context and expert ranks where there are several.

        >>> MeshChoice(2, 1, 4, 8).degrees, MeshChoice(2, 1, 4, 8, expert=4).degrees
        ('2 × 1 × 4', '2 × 1 × 4, expert 4')
        """
        more = {"context": self.context, "expert": self.expert}
        words = [f"{axis} {degree}" for axis, degree in more.items() if degree > 1]
        return ", ".join((f"{self.pipeline} × {self.tensor} × {self.data}", *words))


@dataclass(frozen=True, slots=True)
class Shards:
    """How the blocks of one template are computed on the ranks of the tensor axis.

    `nodes` has a line for each node of its first block: the types of operands and results, as in
    "linear: R S(0) S(0) -> S(2)". `tensors` says how parameters and buffers are held, which follows
    from `nodes`. `blocks` are listed if the entry is for only some blocks of the template. `whole`
    are the nodes that no rule splits, with the reason.
    """

    template: str
    nodes: tuple[str, ...]
    tensors: tuple[str, ...] = ()
    blocks: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Sharding:
    """How the ranks of an axis compute, for each template at a granularity.

    Nodes of no block (the prologue) are whole on every rank. `solution` has the seconds of one
    micro-batch in all blocks, and `memory` the predicted bytes of a rank, averaged over stages.
    """

    level: int
    templates: tuple[Shards, ...]
    solution: Solution | None = None
    memory: int | None = None


# Fields that JSON leaves out at these values: decisions that the mesh or the model does not need,
# costs that follow from the device's figures, and defaults.
_LEFT_OUT = {"selective": False, "offload": False} | dict.fromkeys(
    """
    context sharding vocabulary costs vocabulary_costs meshes runner_up zero updates
    """.split()
)


@dataclass(frozen=True, slots=True)
class Plan:
    """Every decision; the passes say what each field means.

    `orders` is the order of compute of each rank, in the cells of torch.distributed.pipelining,
    where the name of the schedule does not determine it. `solution` belongs to the stages, `search`
    to the orders; `weighed` are the schedules that "auto" chose from. `recompute` are the blocks
    that keep no activations for their backward (named at the coarsest granularity until that is
    decided); with `selective` the others run their cheap operators again (see `cost.selective`).
    With `offload` the activations of the `recompute` blocks wait in the host's memory instead.
    `meshes` are the meshes of the cluster from which `mesh` was chosen, that of the plan first.
    `runner_up` is the fastest alternative to the plan: a plan that is up to 2 % faster and less
    plain, or that of the next mesh. `context` says what context ranks split, `sharding` what tensor
    ranks split of that. `updates` is None where data ranks average whole gradients.
    """

    model: str
    fingerprint: str
    mesh: Shape
    microbatches: int
    precision: str | None = None
    optimizer: str = "adamw"
    schedule: str | None = None
    virtual_stages: int = 1
    orders: tuple[str, ...] | None = None
    granularity: int | None = None
    sent: tuple[str, ...] | None = None
    stages: tuple[StageChoice, ...] | None = None
    recompute: tuple[str, ...] | None = None
    selective: bool = False
    offload: bool = False
    solution: Solution | None = None
    search: Solution | None = None
    weighed: tuple[Weighed, ...] | None = None
    context: Sharding | None = None
    sharding: Sharding | None = None
    vocabulary: VocabularyChoice | None = None
    costs: tuple[TemplateTime, ...] | None = None
    vocabulary_costs: VocabularyTime | None = None
    meshes: tuple[MeshChoice, ...] | None = None
    runner_up: MeshChoice | None = None
    zero: int | None = None
    updates: DataUpdates | None = None
    version: int = VERSION

    def to_json(self) -> str:
        """Sorted, indented JSON; `from_json` reads it back to an equal plan."""
        data = dataclasses.asdict(self)
        for name, plain in _LEFT_OUT.items():
            if data[name] == plain:
                del data[name]
        for axis in ("context", "expert"):
            if data["mesh"][axis] == 1:
                del data["mesh"][axis]
        return json.dumps(data, indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan. Raises InputError that names the field and what was expected there, such as
        seconds and bytes of at least 0.

        The figures that the command line writes into the file as "predicted" are ignored.
        """
        data = documents.parse(text, "plan")
        if isinstance(data, dict):
            data.pop("predicted", None)
        plan = documents.value(cls, data, "plan")
        if plan.version != VERSION:
            message = f"the plan has version {plan.version}; this release reads version {VERSION}"
            raise InputError(message)
        try:
            Mesh(**{axis: getattr(plan.mesh, axis) for axis in AXES})
        except InputError as error:
            message = f"plan.mesh: {error}"
            raise InputError(message) from error
        device, wanted = plan.mesh.device, plan.mesh.pipeline
        if isinstance(device, tuple) and len(device) != wanted:
            count = len(device)
            message = f"plan.mesh.device must name {wanted} devices, or one ({count} found)"
            raise InputError(message)
        for place, figure in _recorded(plan):
            if figure is not None and figure < 0:
                message = f"plan.{place} must be at least 0 ({figure} found)"
                raise InputError(message)
        return plan

    def without_alternatives(self) -> Plan:
        """The plan without what it was compared with: figures of a plan that was edited since."""
        choice = self.vocabulary and dataclasses.replace(self.vocabulary, weighed=None)
        return dataclasses.replace(
            self, vocabulary=choice, weighed=None, meshes=None, runner_up=None, search=None
        )


def _recorded(plan: Plan) -> Iterator[tuple[str, float | None]]:
    """The places of seconds and bytes that a plan records, and these."""
    choice, next_best = plan.vocabulary, [plan.runner_up] if plan.runner_up else []
    for name, solution in (("solution", plan.solution), ("search", plan.search)):
        if solution is not None:
            yield f"{name}.objective", solution.objective
            yield f"{name}.gap", solution.gap
    methods = choice.weighed or () if choice else ()
    lists: list[tuple[str, Sequence[Weighed | Method | MeshChoice]]] = [
        ("weighed[{}]", plan.weighed or ()),
        ("vocabulary.weighed[{}]", methods),
        ("meshes[{}]", plan.meshes or ()),
        ("runner_up", next_best),
    ]
    for place, items in lists:
        for i, item in enumerate(items):
            yield f"{place.format(i)}.seconds", item.seconds
            if not isinstance(item, Weighed):
                yield f"{place.format(i)}.memory", item.memory
