"""A model trained by a plain loop in one process, by its ranks, and how far the two are apart.

It reads no code of the compiler but `pc.compile`, `pc.load` and the worker that a rank uses, and
shares none with `program.verify()`. A case is a module that has

    build() -> (model, loss or None)    the user's modules, the same at every call
    INPUTS      {key: ("float", *shape) | ("tokens", high, *shape) | ("bool", *shape)
                      | ("constant", value)}, of one micro-batch
    POSITIONAL  whether forward takes them by position
    DTYPE       "float64" or "float32", of the parameters and floating inputs
    MESH, OPTIONS                       of pc.Mesh and pc.compile
    TRAINING    {"optimizer": name, "options": {...}, "max_norm": float | None, "steps": int}

The text of this file stands under every script that a sweep prints.

How equal is equal:

    float64     1e-9 of a tensor's largest element, or what rounding makes of it
    narrower    what rounding makes of it, and four roundings of the tensor itself; one that
                rounding changes by half is not judged
    integers    bit for bit

What rounding makes of it is measured: the plain loop runs in float64 again, and every result of
every operator, forward and backward, is changed by a random relative error of one epsilon (in
float16 by up to its least number besides, with the scale of the loss that the ranks have). The
largest distance that this makes, `SAFETY` times, is allowed. (Of float64 itself it would show
nothing, so that takes the epsilon of float32, and 2^-29 of what it makes.)

Random operators: the ranks draw as ever, and what they drew in the forwards is written down, by
operator, probability, step and micro-batch. The plain loop draws the same. So values are compared,
and with them that a backward which computes again has drawn again the same; that micro-batches,
data ranks and steps draw differently is looked at besides. How good torch's generator is, is not.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import parcompiler as pc
from parcompiler import runtime

SAFETY = {torch.float64: 32.0, torch.float32: 32.0, torch.bfloat16: 8.0, torch.float16: 8.0}
PRECISIONS = {
    "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64
}  # fmt: skip
CHOOSING = frozenset(  # operators that round nothing: an element must stay equal to its largest
    "amax amin max min eq ne lt le gt ge where sort topk gather index index_select cat stack clone "
    "masked_fill scatter max_pool2d_with_indices bernoulli_".split()
)
EVALUATION = -1  # in the place of the number of a step
LEAST = 2.0**-24  # number above zero of float16
SCALE = 16.0  # of the loss in float16: small enough that no step is skipped
Tensors = dict[str, Tensor]
Drawn = dict[tuple[Any, ...], list[list[Tensor]]]  # by step, data rank, micro-batch, operator


# ---------------------------------------------------------------------------------- the batches


def batches(case: Any) -> list[dict[str, Any]]:
    """A batch for each step, of all data ranks together; constants as they are."""
    count = case.OPTIONS["microbatches"] * case.MESH.get("data", 1)
    made = []
    for step in range(case.TRAINING["steps"]):
        generator = torch.Generator().manual_seed(step)
        made.append({k: _values(v, count, case.DTYPE, generator) for k, v in case.INPUTS.items()})
    return made


def _values(spec: tuple[Any, ...], count: int, dtype: str, generator: torch.Generator) -> Any:
    """What one input is in `count` micro-batches."""
    kind, *sizes = spec
    if kind == "constant":
        return sizes[0]
    high = sizes.pop(0) if kind == "tokens" else 2
    shape = (sizes[0] * count, *sizes[1:]) if sizes else ()
    if kind == "float":
        return torch.randn(shape, generator=generator, dtype=getattr(torch, dtype))
    values = torch.randint(high, shape, generator=generator)
    return values.bool() if kind == "bool" else values


def piece(case: Any, batch: Mapping[str, Any], i: int, count: int = 1) -> dict[str, Any]:
    """The inputs of micro-batch `i`, or of the i-th `count` of them."""
    found = dict(batch)
    for key, (kind, *sizes) in case.INPUTS.items():
        sizes = sizes[1:] if kind == "tokens" else sizes
        if kind != "constant" and sizes:
            found[key] = batch[key].narrow(0, i * count * sizes[0], count * sizes[0])
    return found


def called(case: Any, model: nn.Module, loss: Any, inputs: Mapping[str, Any]) -> Tensor:
    """The loss of one micro-batch."""
    outputs = model(*inputs.values()) if case.POSITIONAL else model(**inputs)
    if loss is not None:
        outputs = loss(outputs)
    result: Tensor = outputs["loss"] if isinstance(outputs, dict) else outputs
    return result


# ------------------------------------------------------------------------------- the plain loop


def plain(
    case: Any,
    drawn: Drawn,
    placement: Mapping[str, int],
    epsilon: float = 0.0,
    seed: int = 0,
) -> dict[str, Any]:
    """Train the model in one process in float64, micro-batch after micro-batch.

    `placement` says on which stage parameters are, which matters under pipedream alone. With an
    `epsilon` every operator's results have random relative errors of that size.
    """
    model, loss = made(case, torch.float64)
    if state := started(case, torch.float64):
        model.load_state_dict(state)
    named = parameters(model, loss)
    count, ranks = case.OPTIONS["microbatches"], case.MESH.get("data", 1)
    stale = case.OPTIONS.get("schedule") == "pipedream"
    optimizer = _optimizer(case, [p for p in named.values() if p.requires_grad])
    buffers = [_buffers(model, loss) for _ in range(ranks)]  # each data rank has its own
    losses, gradients = [], {}
    half = bool(epsilon) and case.OPTIONS.get("precision") == "fp16"
    scale, perturbed = SCALE if half else 1.0, _Perturbed(epsilon, seed)
    with perturbed:
        for step, batch in enumerate(cast(b, torch.float64) for b in batches(case)):
            sums = []
            late = _Late(case, named, placement, optimizer) if stale else None
            for d in range(ranks):
                _restore(model, loss, buffers[d])
                for i in range(count):
                    if late is not None:
                        late.begin(i)
                    with _Replayed(drawn, (step, d, i)), perturbed.underflowing(half):
                        value = called(case, model, loss, piece(case, batch, d * count + i))
                        (value * scale / (1 if stale else count * ranks)).backward()
                        _make_whole(named.values())
                    sums.append(value.detach())
                    if late is not None:
                        _divide(named.values(), scale)
                        late.end()
                buffers[d] = _buffers(model, loss)
            losses.append(torch.stack(sums).mean())
            if stale:
                continue
            _divide(named.values(), scale)
            if step == 0:
                gradients = {n: p.grad.clone() for n, p in named.items() if p.grad is not None}
            if case.TRAINING["max_norm"] is not None:
                trained = [p for p in named.values() if p.grad is not None]
                nn.utils.clip_grad_norm_(trained, case.TRAINING["max_norm"])
            optimizer.step()
            optimizer.zero_grad()
    _restore(model, loss, buffers[0])
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with perturbed:
        evaluation = _evaluated(case, model, loss, buffers, drawn)
    return {
        "losses": torch.stack(losses), "gradients": gradients, "state": state,
        "evaluation": evaluation,
    }  # fmt: skip


def _divide(parameters: Iterable[nn.Parameter], scale: float) -> None:
    """Take the scale of the loss out of the gradients."""
    for parameter in parameters:
        if parameter.grad is not None and scale != 1.0:
            parameter.grad.div_(scale)


class _Late:
    """PipeDream (1806.03377): a stage forwards micro-batch i with the weights that it has then.

    Stage j of P sends P - 1 - j micro-batches on before the first one is back; from then on every
    forward follows a backward and its update. So the forward of i comes after i - (P - 1 - j)
    updates, and its backward uses the same weights. Updates are in order, each by the gradient of
    one micro-batch alone; a step ends with all of them made.
    """

    def __init__(
        self,
        case: Any,
        named: Mapping[str, nn.Parameter],
        placement: Mapping[str, int],
        optimizer: torch.optim.Optimizer,
    ) -> None:
        last = case.MESH.get("pipeline", 1) - 1
        self._late = {name: last - placement.get(name, last) for name in named}
        self._named, self._optimizer = named, optimizer
        self._versions = [{n: p.detach().clone() for n, p in named.items()}]

    def begin(self, i: int) -> None:
        """Give the parameters the values that the forward of micro-batch `i` meets."""
        for name, parameter in self._named.items():
            parameter.data = self._versions[max(0, i - self._late[name])][name].clone()

    def end(self) -> None:
        """Update the newest values by the gradients that a micro-batch has left."""
        for name, parameter in self._named.items():
            parameter.data = self._versions[-1][name].clone()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._versions.append({n: p.detach().clone() for n, p in self._named.items()})


def made(case: Any, dtype: torch.dtype) -> tuple[nn.Module, Any]:
    """The model and its loss in a precision, with the weights that both sides start from."""
    model, loss = case.build()
    modules = [m for m in (model, loss) if isinstance(m, nn.Module)]
    for module in modules:  # as Module.to, which makes complex tensors real
        module._apply(lambda tensor: tensor.to(_in(dtype, tensor.dtype)))
    return model, loss


def _in(dtype: torch.dtype, kind: torch.dtype) -> torch.dtype:
    """What a floating or complex dtype becomes in the precision of `dtype`."""
    if kind.is_complex:
        return dtype.to_complex()
    return dtype if kind.is_floating_point else kind


def started(case: Any, dtype: torch.dtype) -> Tensors:
    """A state dict other than that of `build`, for a rank to load; {} if the case loads none."""
    if not case.TRAINING.get("loads"):
        return {}
    model, _ = made(case, dtype)
    return {
        name: tensor * 0.875 if tensor.is_floating_point() else tensor.clone()
        for name, tensor in model.state_dict().items()
    }


def parameters(model: nn.Module, loss: Any) -> dict[str, nn.Parameter]:
    """The parameters by name, those of a loss behind `loss.`."""
    found = dict(model.named_parameters())
    if isinstance(loss, nn.Module):
        found |= {f"loss.{name}": p for name, p in loss.named_parameters()}
    return found


def _named_buffers(model: nn.Module, loss: Any) -> Tensors:
    """The buffers by name."""
    found = dict(model.named_buffers())
    if isinstance(loss, nn.Module):
        found |= {f"loss.{name}": b for name, b in loss.named_buffers()}
    return found


def _buffers(model: nn.Module, loss: Any) -> Tensors:
    """Copies of the buffers."""
    return {name: tensor.clone() for name, tensor in _named_buffers(model, loss).items()}


def _restore(model: nn.Module, loss: Any, values: Tensors) -> None:
    """Give the buffers earlier values."""
    for name, buffer in _named_buffers(model, loss).items():
        buffer.data = values[name].clone()


def _make_whole(trained: Iterable[nn.Parameter]) -> None:
    """Give sparse gradients all their rows: torch clips no others."""
    for parameter in trained:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.to_dense()


def _optimizer(case: Any, trained: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of the case."""
    kind = getattr(torch.optim, case.TRAINING["optimizer"])
    given: list[Tensor] = [*trained, *([] if trained else [torch.zeros(())])]
    optimizer: torch.optim.Optimizer = kind(given, **case.TRAINING["options"])
    return optimizer


def _evaluated(
    case: Any, model: nn.Module, loss: Any, buffers: list[Tensors], drawn: Drawn
) -> Tensor:
    """The mean loss of the first batch in evaluation mode; changes buffers."""
    count = case.OPTIONS["microbatches"]
    batch = cast(batches(case)[0], torch.float64)
    for module in (model, loss):
        if isinstance(module, nn.Module):
            module.eval()
    losses = []
    for d, own in enumerate(buffers):
        _restore(model, loss, own)
        for i in range(count):
            with torch.no_grad(), _Replayed(drawn, (EVALUATION, d, i)):
                losses.append(called(case, model, loss, piece(case, batch, d * count + i)))
    return torch.stack(losses).mean()


def cast(batch: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """A batch with floating tensors in `dtype`."""

    def other(value: Any) -> Any:
        floating = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(dtype) if floating else value

    return {key: other(value) for key, value in batch.items()}


# --------------------------------------------------------------------------- chance and rounding


def _draw(func: Any, args: tuple[Any, ...]) -> str:
    """The name of a random operator with its probability; "" of another operator."""
    name = str(func)
    if name in ("aten.bernoulli_.float", "aten.rand_like.default", "aten.randn_like.default"):
        return f"{name} {args[1]:.6f}" if len(args) > 1 else name
    return ""


class _Drawn(TorchDispatchMode):
    """Writes down what random operators draw in the forwards of a rank."""

    def __init__(self, worker: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.worker, self.step = worker, 0
        self.made: list[dict[str, Any]] = []
        self._split: tuple[Any, ...] = ()  # how what ranks draw makes a whole

    def __enter__(self) -> Any:
        """See how pieces are drawn that ranks have by themselves."""
        self._own = runtime.own_draws
        runtime.own_draws = self._drawing_own
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        """Leave the runtime as it was."""
        runtime.own_draws = self._own
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    @contextmanager
    def _drawing_own(
        self, dim: int, sizes: Any = None, axis: str = "tensor", zigzag: bool = False
    ) -> Iterator[None]:
        self._split = dim, sizes, zigzag
        with self._own(dim, sizes, axis, zigzag):
            yield
        self._split = ()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operator."""
        result = func(*args, **(kwargs or {}))
        line = self.worker.flight.current
        if (name := _draw(func, args)) and line is not None and line.kind.value == "FORWARD":
            where = {"step": self.step, "stage": line.stage, "i": line.microbatch, "name": name}
            where["split"] = self._split
            self.made.append(where | {"value": result.detach().clone().contiguous()})
        return result


class _Replayed(TorchDispatchMode):
    """Lets random operators draw what the ranks drew at one place; at others they draw."""

    def __init__(self, drawn: Drawn, place: tuple[int, int, int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._drawn, self._place = drawn, place
        self._count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operator."""
        result = func(*args, **(kwargs or {}))
        if name := _draw(func, args):
            pieces = self._drawn.get((*self._place, name), [])
            number, self._count[name] = self._count[name], self._count[name] + 1
            if number < len(pieces):
                result.copy_(_whole(pieces[number], result.shape))
        return result


def _whole(pieces: list[Tensor], shape: torch.Size) -> Tensor:
    """What the tensor or context ranks of a line drew together: all the same, or each a piece."""
    if pieces[0].shape == shape:
        return pieces[0]
    (dim,) = (k for k, size in enumerate(shape) if pieces[0].shape[k] != size)
    return torch.cat(pieces, dim)


class _Perturbed(TorchDispatchMode):
    """Changes what operators read and what they compute by random relative errors of `epsilon`,
    and within `underflowing` by up to the least number of float16 besides, but for zeros."""

    def __init__(self, epsilon: float, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._epsilon, self._least = epsilon, 0.0
        self._generator = torch.Generator().manual_seed(seed)

    @contextmanager
    def underflowing(self, on: bool) -> Iterator[None]:
        """Around what is computed in float16, where `on`."""
        self._least = LEAST if on else 0.0
        yield
        self._least = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operator."""
        kwargs = kwargs or {}
        aliases = [r.alias_info for r in func._schema.returns]
        chooses = func._schema.name.removeprefix("aten::") in CHOOSING
        views = all(alias is not None for alias in aliases)  # or writes in place
        if not self._epsilon or views or chooses:
            result = func(*args, **kwargs)
            if any(alias is not None and alias.is_write for alias in aliases):
                result.copy_(self._changed(result))
            return result
        if "batch_norm" not in str(func):  # which writes to what it reads, and does not say so
            args, kwargs = pytree.tree_map(self._changed, (args, kwargs))
        return pytree.tree_map(self._changed, func(*args, **kwargs))

    def _changed(self, leaf: Any) -> Any:
        """A value with errors, where it is a tensor in float64."""
        if not isinstance(leaf, Tensor) or leaf.dtype != torch.float64:
            return leaf
        noise = 2 * torch.rand(leaf.shape, generator=self._generator, dtype=leaf.dtype) - 1
        return leaf * (1 + self._epsilon * noise) + self._least * noise * (leaf != 0)


# ------------------------------------------------------------------------------------ the ranks


def on_rank(folder: Path, rank: int, size: int) -> None:
    """Train on one rank of an exported program, and write down what came out."""
    store = dist.FileStore(str(folder / "store"), size)
    wait = timedelta(seconds=150)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=wait)
    job = torch.load(folder / "job.pt", weights_only=True)
    try:
        with pc.load(folder / "program").worker(compiled=job["compiled"]) as worker:
            result = _trained(worker, job)
        torch.save(result, folder / f"rank_{rank}.pt")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _trained(worker: Any, job: dict[str, Any]) -> dict[str, Any]:
    """The steps of one rank."""
    at, grid = worker.program.coordinate, worker.program.grid
    data = grid.batch_of(at.data)
    own = [job["batches"][data][step] for step in range(job["steps"])]
    inputs = [tuple(b.values()) if job["positional"] else b for b in own]
    kind = getattr(torch.optim, job["optimizer"])
    if job["state"]:
        worker.load_state_dict(job["state"])
    worker.set_optimizer(kind, max_norm=job["max_norm"], **job["options"])
    if worker.program.narrow == torch.float16:
        worker.loss_scale = SCALE
    losses, gradients = [], None
    with _Drawn(worker) as chance:
        for chance.step, batch in enumerate(inputs):
            if chance.step or worker.program.asynchronous:
                losses.append(worker.train_step(batch))
                continue
            losses.append(worker.step(batch))
            gradients = worker.gather_gradients()
            worker.optimizer_step()
        chance.step = EVALUATION
        evaluation = worker.evaluate(inputs[0])
    state = worker.gather_state_dict()
    return {
        "losses": torch.stack(losses), "gradients": gradients, "state": state,
        "evaluation": evaluation, "drawn": chance.made, "data": data,
        "piece": at.tensor + at.context,
        "parameters": [name for name, _ in worker.named_parameters()],
        "pipeline": at.pipeline, "skipped": worker.skipped_steps,
    }  # fmt: skip


def serve() -> None:
    """Run ranks of one program after another, as lines of standard input say."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    for line in sys.stdin:
        job = json.loads(line)
        answer = ""
        os.environ |= {"RANK": str(job["rank"]), "WORLD_SIZE": str(job["size"])}
        sys.path.insert(0, job["folder"])  # functions of the model's own are imported
        before = set(sys.modules)
        try:
            on_rank(Path(job["folder"]), job["rank"], job["size"])
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        sys.path.remove(job["folder"])
        for name in set(sys.modules) - before:
            if name.startswith("random_model_"):
                del sys.modules[name]
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


# ------------------------------------------------------------------------------- the comparison


def written(case: Any, folder: Path) -> int:
    """Compile a case and export it for its ranks; their number."""
    dtype = getattr(torch, case.DTYPE)
    model, loss = made(case, dtype)
    data, count = case.MESH.get("data", 1), case.OPTIONS["microbatches"]
    everything = batches(case)
    sample = piece(case, everything[0], 0)
    inputs: Any = tuple(sample.values()) if case.POSITIONAL else sample
    mesh = pc.Mesh(**case.MESH)
    program = pc.compile(model, mesh, inputs, loss, progress=False, **case.OPTIONS)
    program.export(folder / "program")
    lifted = torch.float64 if case.OPTIONS.get("precision") == "fp64" else dtype
    own = [[cast(piece(case, b, d, count), lifted) for b in everything] for d in range(data)]
    job = case.TRAINING | {"batches": own, "positional": case.POSITIONAL}
    job["state"] = started(case, lifted)
    job["compiled"] = bool(os.environ.get("COMPILED"))
    torch.save(_plain_data(job), folder / "job.pt")
    return mesh.size


def _plain_data(value: Any) -> Any:
    """Values that `torch.load(weights_only=True)` reads, each tensor with memory of its own."""
    if isinstance(value, Tensor):
        return value.contiguous().clone()
    if isinstance(value, dict):
        return {k: _plain_data(v) for k, v in value.items()}
    return [_plain_data(v) for v in value] if isinstance(value, list | tuple) else value


def compared(case: Any, folder: Path, size: int) -> list[str]:
    """What is wrong with the results that ranks have left in a folder, a line each."""
    ranks = [torch.load(folder / f"rank_{r}.pt", weights_only=True) for r in range(size)]
    drawn = _assembled(ranks)
    placement = {n: rank["pipeline"] for rank in ranks for n in rank["parameters"]}
    exact = plain(case, drawn, placement)
    precision = case.OPTIONS.get("precision")
    narrow = PRECISIONS[precision or {"float64": "fp64", "float32": "fp32"}[case.DTYPE]]
    faults = [] if ranks[0]["skipped"] == 0 else [f"skipped: {ranks[0]['skipped']} steps"]
    faults += [*_different_draws(drawn)]
    for rank in ranks:
        if not torch.equal(rank["losses"], ranks[0]["losses"]):
            faults.append(f"loss: {rank['losses']} on one rank, {ranks[0]['losses']} on another")
    return [*faults, *_distances(case, exact, ranks[0], narrow, drawn, placement)]


def _distances(
    case: Any,
    exact: dict[str, Any],
    found: dict[str, Any],
    narrow: torch.dtype,
    drawn: Drawn,
    placement: Mapping[str, int],
) -> Iterator[str]:
    """Tensors of the ranks that are too far from those of the plain loop."""
    wanted, given = _named(case, exact), _named(case, found)
    for label in wanted.keys() - given.keys():
        yield f"{label}: only the plain loop has it"
    for label in given.keys() - wanted.keys():
        yield f"{label}: only the ranks have it"
    limits: dict[str, float] = {}
    for label in sorted(wanted.keys() & given.keys()):
        a, b = wanted[label], given[label]
        if a.shape != b.shape:
            shapes = tuple(b.shape), tuple(a.shape)
            yield f"{label}: shape {shapes[0]} on the ranks, {shapes[1]} in the plain loop"
        elif not (a.is_floating_point() or a.is_complex()):
            if not torch.equal(a, b):
                yield f"{label}: {b.tolist()} on the ranks, {a.tolist()} in the plain loop"
        else:
            distance, size = _size(a - b.to(a.dtype)), _size(a)
            if narrow == torch.float64 and distance <= 1e-9 * size:
                continue
            if not limits:
                limits = _limits(case, wanted, narrow, drawn, placement)
            limit = limits[label]
            blind = narrow != torch.float64 and limit >= 0.5 * size
            if not (distance <= limit or (blind and distance < float("inf"))):
                yield (
                    f"{label}: {distance:.2e} from the plain loop, of {size:.2e}; "
                    f"rounding explains {limit:.1e}"
                )


def _named(case: Any, result: Mapping[str, Any]) -> Tensors:
    """All tensors of a result by what they are; tied parameters by one of their names."""
    model, _ = case.build()
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[name] = first.setdefault(id(parameter), name)
    found: Tensors = {"evaluation": result["evaluation"]}
    found |= {f"loss of step {k}": loss for k, loss in enumerate(result["losses"])}
    for kind in ("gradients", "state"):
        for name, tensor in (result[kind] or {}).items():
            found[f"{kind} {names.get(name, name)}"] = tensor
    return found


def _size(tensor: Tensor) -> float:
    """The root mean square."""
    return float(tensor.abs().square().mean().sqrt()) if tensor.numel() else 0.0


def _limits(
    case: Any, exact: Tensors, narrow: torch.dtype, drawn: Drawn, placement: Mapping[str, int]
) -> dict[str, float]:
    """How far rounding may take each tensor."""
    double = narrow == torch.float64
    epsilon = torch.finfo(torch.float32 if double else narrow).eps
    factor = 2.0**-29 if double else 1.0
    limits: dict[str, float] = defaultdict(float)
    for seed in range(3):
        other = _named(case, plain(case, drawn, placement, epsilon, seed))
        for label, tensor in exact.items():
            if label in other and (tensor.is_floating_point() or tensor.is_complex()):
                distance = _size(other[label] - tensor) * factor
                limits[label] = max(limits[label], SAFETY[narrow] * distance)
    relative = 1e-9 if double else 4 * epsilon  # its own last operations
    least = LEAST / SCALE if narrow == torch.float16 else 0.0  # the smallest gradient
    known = {label: _size(exact[label]) for label in limits}
    return {label: limits[label] + relative * size + least for label, size in known.items()}


def _assembled(ranks: list[dict[str, Any]]) -> Drawn:
    """What was drawn, with the pieces of tensor or context ranks beside each other."""
    places: dict[tuple[Any, ...], dict[tuple[int, int], list[tuple[Any, ...]]]] = {}
    for rank in ranks:
        numbers: Counter[tuple[Any, ...]] = Counter()
        for item in rank["drawn"]:
            place = (item["step"], rank["data"], item["i"], item["name"])
            number = numbers[place, item["stage"]]
            numbers[place, item["stage"]] += 1
            line = places.setdefault(place, {}).setdefault((item["stage"], number), [])
            line.append((rank["piece"], item["value"], item["split"]))
    return {
        place: [_in_order(sorted(lines[key], key=lambda item: item[0])) for key in sorted(lines)]
        for place, lines in places.items()
    }


def _in_order(line: list[tuple[Any, ...]]) -> list[Tensor]:
    """The pieces of a line of ranks in the order of the whole: those of each segment of the
    dimension by itself; zigzag ones have a chunk from either end of it."""
    pieces, split, n = [value for _, value, _ in line], line[0][2], len(line)
    if not split:
        return pieces
    dim, sizes, zigzag = split
    if sizes is None:
        sizes = (n * pieces[0].shape[dim],)
    count = n * (1 + zigzag)  # of chunks of a segment; the longer ones come first
    parts: dict[tuple[int, int], Tensor] = {}
    for rank, value in enumerate(pieces):
        own = (rank, count - 1 - rank)[: 1 + zigzag]
        places = [(k, chunk) for k in range(len(sizes)) for chunk in own]
        lengths = [sizes[k] // count + (chunk < sizes[k] % count) for k, chunk in places]
        parts |= dict(zip(places, value.split(lengths, dim), strict=True))
    return [torch.cat([parts[place] for place in sorted(parts)], dim)]


def _different_draws(drawn: Drawn) -> Iterator[str]:
    """Places that drew the same numbers although they must not."""
    seen: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    for place, draws in drawn.items():
        for number, pieces in enumerate(draws):
            value = torch.cat([p.flatten() for p in pieces])
            keep = float(value.double().mean())
            if value.numel() >= 64 and 0.02 < keep < 0.98:
                key = (place[3], tuple(value.tolist()))
                if key in seen:
                    yield f"chance: {place} number {number} drew what {seen[key]} drew"
                seen[key] = place


def main() -> None:
    """Run the case that this script is, and print what is wrong with it."""
    torch.set_num_threads(1)
    case = importlib.import_module(Path(sys.argv[0]).stem)
    with tempfile.TemporaryDirectory() as name:
        size = written(case, Path(name))
        if size == 1:
            _spawned(0, name, 1)
        else:
            mp.spawn(_spawned, (name, size), nprocs=size)
        faults = compared(case, Path(name), size)
    print("\n".join(faults) or "the ranks train as the plain loop does")
    sys.exit(bool(faults))


def _spawned(rank: int, folder: str, size: int) -> None:
    """A rank in a process of its own."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "PARCOMPILER_DEVICE": "cpu"}
    torch.set_num_threads(1)
    on_rank(Path(folder), rank, size)


if __name__ == "__main__":
    serve() if sys.argv[1:] == ["serve"] else main()
