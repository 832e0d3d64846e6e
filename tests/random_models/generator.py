"""Random models, statement by statement on real tensors, and random options to compile them with.

    inputs ─► statement ─► statement ─► ... ─► loss       each is run as it is drawn: what
                 │                                        fails or grows large is drawn again
                 └─ or a block: a class of its own, once, twice, or in a list of layers

>>> case = draw(0)
>>> "class Model(nn.Module):" in case.source()
True
"""

from __future__ import annotations

import dataclasses
import linecache
import math
import random
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from tests.random_models import plain
from tests.random_models.mixtures import mixture
from tests.random_models.statements import TEMPLATES, Template

LARGEST, MOST = 2000, 20.0  # elements of a value, and their size
OPEN = frozenset(  # kinds of statements that are left out, for programs differ in them
    ("spectral norm",)  # evaluates by the graph of training, which iterates
)
EXACT = ("float64", "fp64")  # what is compared to 1e-9

VARIABLES = r"v\d+|x\d*|y|ids|flag|factor|scale|labels|loss"

FUNCTION_OF_OUR_OWN = """\
class Halved(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        context.save_for_backward(x)
        return x * 0.5

    @staticmethod
    def backward(context, gradient):
        (x,) = context.saved_tensors
        return gradient * 0.25 * x.cos()


"""
HEAD = '''\
"""Random model {number}."""

import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations


'''


@dataclass(frozen=True, slots=True)
class Statement:
    """A line or more of `forward` that makes `targets`, and what they need in `__init__`."""

    targets: tuple[str, ...]
    text: str
    init: tuple[str, ...] = ()
    kind: str = ""

    @property
    def reads(self) -> set[str]:
        """The variables in it that others have made."""
        return names_in(self.text) - {name for name in self.targets if name != "loss"}

    def renamed(self, names: Mapping[str, str]) -> Statement:
        """The statement where it reads other variables."""
        return dataclasses.replace(self, text=renamed(self.text, names))


@dataclass(frozen=True, slots=True)
class Body:
    """A module: its class, what forward takes, and what it returns."""

    name: str
    takes: tuple[str, ...]
    statements: tuple[Statement, ...]
    returns: str

    def source(self) -> str:
        """The class as text."""
        made = "\n".join(line for s in self.statements for line in s.init)
        done = "\n".join(s.text for s in self.statements)
        return (
            f"class {self.name}(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
            f"{indent(made, ' ' * 8)}\n\n    def forward(self, {', '.join(self.takes)}):\n"
            f"{indent(done, ' ' * 8)}\n        return {self.returns}\n\n\n"
        )


@dataclass(frozen=True)
class Case:
    """A model, its inputs, and everything that it is compiled and trained with."""

    number: int
    bodies: tuple[Body, ...]  # what is used stands before what uses it; the model is the last
    inputs: dict[str, tuple[Any, ...]]
    mesh: dict[str, int]
    options: dict[str, Any]
    training: dict[str, Any]
    dtype: str = "float64"
    positional: bool = False
    evaluating: bool = False  # the model is in evaluation mode when it is compiled, and stays so
    loss: str = ""  # the text of a function or module `criterion`, where the model returns none

    @property
    def kinds(self) -> set[str]:
        """What it has in it: the kinds of its statements, and of what it returns."""
        kinds = {statement.kind for body in self.bodies for statement in body.statements}
        kinds |= {"returned beside the loss"} if self.bodies[-1].returns.startswith("{") else set()
        kinds |= {"model in evaluation mode"} if self.evaluating else set()
        return kinds | ({"loss module"} if self.loss.startswith("class") else set())

    def source(self) -> str:
        """The module that `plain.py` reads."""
        loss = f"\n\n{self.loss}\n" if self.loss else ""
        halved = FUNCTION_OF_OUR_OWN if "function" in self.kinds else ""
        model = "Model().eval()" if self.evaluating else "Model()"
        made = "criterion()" if self.loss.startswith("class") else "criterion"
        return (
            HEAD.format(number=self.number)
            + halved
            + "\n".join(body.source() for body in self.bodies)
            + loss
            + f"\ndef build():\n    torch.manual_seed({self.number})\n"
            + f"    return {model}, {made if self.loss else None}\n\n\n"
            + f"INPUTS = {self.inputs}\nPOSITIONAL = {self.positional}\nDTYPE = {self.dtype!r}\n"
            + f"MESH = {self.mesh}\nOPTIONS = {self.options}\nTRAINING = {self.training}\n"
        )

    @property
    def weights(self) -> list[str]:
        """The names of the parameters."""
        space: dict[str, Any] = {}
        exec(self.source(), space)
        named = space["build"]()[0].named_parameters()
        return [name for name, parameter in named if parameter.dim() == 2]

    def script(self) -> str:
        """A script that shows by itself what this case does: the model, then `plain.py`."""
        own = (Path(__file__).parent / "plain.py").read_text()
        return self.source() + "\n\n" + own.replace("from __future__ import annotations\n", "", 1)


def names_in(text: str) -> set[str]:
    """The variables in a text, without attributes and names of arguments."""
    return set(re.findall(rf"(?<![\w.])(?:{VARIABLES})(?![\w\"])", text))


def renamed(text: str, names: Mapping[str, str]) -> str:
    """A text with other variables."""
    for name, other in names.items():
        text = re.sub(rf"(?<![\w.]){name}(?![\w\"])", other, text)
    return text


def used(bodies: Sequence[Body]) -> tuple[Body, ...]:
    """The model and the blocks that others call."""
    text = "\n".join(line for body in bodies for s in body.statements for line in s.init)
    return tuple(body for body in bodies if body.name == "Model" or f"{body.name}(" in text)


def module_of(case: Case, folder: Path) -> ModuleType:
    """The case as an imported module, from a file, so that the compiler finds its source."""
    path = folder / f"random_model_{case.number}.py"
    path.write_text(case.source())
    linecache.checkcache(str(path))
    module = sys.modules[path.stem] = ModuleType(path.stem)
    module.__file__ = str(path)
    exec(compile(path.read_text(), str(path), "exec"), module.__dict__)
    return module


def eager(case: Case) -> str:
    """Why the model itself cannot be trained in plain torch; "" if it can."""
    try:
        with tempfile.TemporaryDirectory(prefix="random-model-") as folder:
            module: Any = module_of(case, Path(folder))
            losses = [_loss_in(module, dtype) for dtype in ("float64", case.dtype)]
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    good = all(loss.dim() == 0 and 1e-6 < float(loss.detach()) < 1e3 for loss in losses)
    return "" if good else f"the losses are {losses}"


def _loss_in(module: Any, name: str) -> Tensor:
    """The loss of a micro-batch in a precision, after its backward."""
    dtype = getattr(torch, name)
    model, loss = plain.made(module, dtype)
    batch = plain.piece(module, plain.cast(plain.batches(module)[0], dtype), 0)
    value = plain.called(module, model, loss, batch)
    value.backward()
    return value


class Drawing:
    """The drawing of one body: values by name, as they are when its statements have run."""

    def __init__(self, case: _Draft, values: dict[str, Any]) -> None:
        self.case, self.random = case, case.random
        self.module = nn.Module()
        self.values = dict(values)
        self.statements: list[Statement] = []
        self.used: set[str] = set()

    def run(self, statement: Statement) -> bool:
        """Run a statement and keep it, unless it fails or makes what is of no use."""
        values = dict(self.values)
        space = {"self": self.module, **self.case.space, **values}
        try:
            exec("\n".join(statement.init), space)
            exec(statement.text, space)
            made = [space[name] for name in statement.targets]
        except Exception:
            made = [None]
        if not all(_is_fine(value) for value in made):
            return False
        self.values |= dict(zip(statement.targets, made, strict=True))
        self.used |= statement.reads
        self.statements.append(statement)
        return True

    def floats(self) -> list[str]:
        """Names of floating values with dimensions behind the rows."""
        return [n for n, v in self.values.items() if _is_float(v) and v.dim() >= 2]

    def pick(self, names: Sequence[str]) -> str:
        """One of some values: rather one that is new, and that nobody reads."""
        weights = [(1 + k) * (3 if name not in self.used else 1) for k, name in enumerate(names)]
        return self.random.choices(names, weights)[0]

    def fill(self, template: Template) -> Statement | None:
        """A template with values in its places; None where there are no such values."""
        floats = self.floats()
        if not floats:
            return None
        f = self.pick(floats)
        shape = self.values[f].shape
        alike = [n for n in floats if self.values[n].shape == shape]
        pools = {"i": _is_integer, "b": _is_bool, "c": _is_complex}
        places: dict[str, Any] = {"f": f, "w": shape[-1]}
        for place in ("g", "h"):
            places[place] = self.pick(alike if self.random.random() < 0.85 else floats)
        for place, fits in pools.items():
            names = [n for n, v in self.values.items() if fits(v)]
            if not names and f"{{{place}}}" in template.text:
                return None
            places[place] = self.pick(names) if names else ""
        places["d"] = self.random.randrange(1, len(shape))
        places["s"] = shape[places["d"]]
        places["v"] = self.random.choice((2, 3, 4, 6, 8))
        places["n"] = self.case.next()
        places["q"] = round(0.1 + 0.013 * (places["n"] % 40), 3)
        targets = [place for place in ("t", "u") if f"{{{place}}}" in template.text]
        for place in targets:
            places[place] = f"v{self.case.next()}"
        return Statement(
            tuple(places[place] for place in targets),
            template.text.format(**places),
            tuple(line.strip().format(**places) for line in template.init),
            template.kind,
        )

    def draw(self, templates: Sequence[Template], count: int) -> None:
        """So many statements."""
        weights = [template.weight for template in templates]
        for _ in range(count):
            for _ in range(30):
                (template,) = self.random.choices(templates, weights)
                statement = self.fill(template)
                if statement is not None and self.run(statement):
                    break


def _is_float(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _is_integer(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.long and value.dim() >= 1


def _is_bool(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.bool and value.dim() == 1


def _is_complex(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_complex()


def _is_fine(value: object) -> bool:
    """Whether a value is a tensor of moderate size, and not all zero."""
    if not isinstance(value, Tensor) or not 0 < value.numel() <= LARGEST or value.dim() > 4:
        return False
    if value.is_floating_point() or value.is_complex():
        size = value.detach().abs()
        return bool(size.isfinite().all()) and 1e-3 < float(size.max()) < MOST
    return True


class _Draft:
    """What the drawing of a case has so far."""

    def __init__(self, number: object, attempt: int) -> None:
        self.random = random.Random(f"{number} {attempt}")
        self.bodies: list[Body] = []
        self.space: dict[str, Any] = {}
        exec(HEAD.format(number=number) + FUNCTION_OF_OUR_OWN, self.space)
        self.templates: Sequence[Template] = TEMPLATES
        self._next = 0

    def next(self) -> int:
        """A number that nothing else has."""
        self._next += 1
        return self._next

    def add(self, body: Body) -> None:
        """Make a class known to those that follow."""
        self.bodies.append(body)
        exec(body.source(), self.space)


def draw(number: int) -> Case:
    """The case of a number; always the same."""
    for attempt in range(100):
        torch.manual_seed(number)
        case = _drawn(_Draft(number, attempt), number)
        if case is not None and not eager(case):
            return case
    message = f"no case for {number}"
    raise AssertionError(message)


def _drawn(draft: _Draft, number: int) -> Case | None:
    """A case, unless the model cannot be trained as it has become."""
    chosen = draft.random
    dtype, options = _precision(chosen)
    draft.templates = [
        t
        for t in TEMPLATES
        if t.kind not in OPEN and not (t.exact and (dtype, options.get("precision")) not in _DOUBLE)
    ]
    rows, length, width = chosen.choice((2, 3, 4)), chosen.choice((3, 4, 5)), chosen.choice((4, 6))
    language = chosen.random() < 0.35
    inputs: dict[str, tuple[Any, ...]] = {}
    if language:
        inputs["ids"] = ("tokens", 12, rows, length)
    if not language or chosen.random() < 0.2:
        inputs["x"] = ("float", rows, length, width)
    extra = {
        "x2": ("float", rows, width), "flag": ("bool", rows), "factor": ("float",),
        "scale": ("constant", chosen.choice((2.0, 3, True, None))),
        "ids": ("tokens", 12, rows, length),
    }  # fmt: skip
    for name, spec in extra.items():
        if chosen.random() < 0.15:
            inputs.setdefault(name, spec)
    inputs = {k: inputs[k] for k in chosen.sample(sorted(inputs), len(inputs))}
    drawing = Drawing(draft, _values(inputs))
    _begin(drawing, inputs, width)
    mesh = chosen.choices([*MESHES], [*MESHES.values()])[0]
    for _ in range(chosen.randrange(3, 5) + 2 * (mesh[0] - 2)):
        if not _block(drawing):
            drawing.draw(draft.templates, 1)
        drawing.draw(draft.templates, chosen.randrange(0, 4))
    ending = _end(drawing, inputs, rows, length)
    if ending is None:
        return None
    returns, loss = ending
    draft.add(Body("Model", tuple(inputs), tuple(drawing.statements), returns))
    case = Case(
        number=number, bodies=used(draft.bodies), inputs=inputs, dtype=dtype, loss=loss,
        positional=chosen.random() < 0.3, evaluating=chosen.random() < 0.04,
        mesh={}, options=options, training={},
    )  # fmt: skip
    return _with_experts(_with_options(case, chosen, language, mesh), drawing.values)


_DOUBLE = (("float64", None), ("float32", "fp64"))


def _precision(chosen: random.Random) -> tuple[str, dict[str, Any]]:
    """The dtype of the model, and the option `precision`."""
    kinds: list[tuple[str, str | None]] = [
        ("float64", None), ("float32", "fp64"), ("float32", None), ("float32", "fp32"),
        ("float32", "bf16"), ("float32", "fp16"),
    ]  # fmt: skip
    dtype, precision = chosen.choices(kinds, (60, 12, 8, 2, 10, 8))[0]
    return dtype, {} if precision is None else {"precision": precision}


def _values(inputs: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Inputs to draw statements on: real ones."""
    values: dict[str, Any] = {}
    for name, (kind, *sizes) in inputs.items():
        if kind == "float" and sizes:
            values[name] = torch.randn(sizes)
        elif kind == "tokens":
            values[name] = torch.randint(sizes[0], sizes[1:])
        elif kind == "bool":
            values[name] = torch.randint(2, sizes).bool()
        elif kind == "float":
            values[name] = torch.tensor(0.5)
        else:
            values[name] = sizes[0]
    return values


def _begin(drawing: Drawing, inputs: dict[str, tuple[Any, ...]], width: int) -> None:
    """The first statements: what makes floats of tokens, and reads what is seldom read."""
    chosen, draft = drawing.random, drawing.case
    if "x" not in inputs:
        init = (f"self.wte = nn.Embedding(12, {width})",)
        drawing.run(Statement(("v0",), "v0 = self.wte(ids)", init, "embedding"))
    first = "v0" if "x" not in inputs else "x"
    if "factor" in inputs:
        drawing.run(Statement(("v98",), f"v98 = {first} * (factor + 1.0)", (), "scalar input"))
        first = "v98"
    if "scale" in inputs:
        text = f"v99 = {first} if scale is None else {first} * float(scale)"
        drawing.run(Statement(("v99",), text, (), "constant input"))
    if "x2" in inputs and chosen.random() < 0.7:
        text = f"v97 = self.lift(x2).unsqueeze(1) + {first}"
        init = (f"self.lift = nn.Linear({width}, {width})",)
        drawing.run(Statement(("v97",), text, init, "several inputs"))
    draft._next = 100


def _block(drawing: Drawing) -> bool:
    """A statement that calls a block; the block is drawn too."""
    chosen, draft = drawing.random, drawing.case
    floats = [n for n in drawing.floats() if drawing.values[n].dim() >= 2]
    if not floats:
        return False
    f = drawing.pick(floats)
    takes = [f]
    if chosen.random() < 0.3:
        takes.append(drawing.pick(floats))
    if len(set(takes)) < len(takes):
        takes = [f]
    number, shape = draft.next(), drawing.values[f].shape
    names = [f"x{number + k}" for k in range(len(takes))]
    for _ in names:
        draft.next()
    inner = Drawing(
        draft, {n: drawing.values[t].detach() for n, t in zip(names, takes, strict=True)}
    )
    inner.draw(draft.templates, chosen.randrange(2, 6))
    made = [n for n in inner.floats() if n not in names]
    same = [n for n in made if inner.values[n].shape == shape]
    if not made:
        return False
    results = [(same or made)[-1]]
    if len(made) > 1 and chosen.random() < 0.2 and made[0] != results[0]:
        results.append(made[0])
    body = Body(f"Block{number}", tuple(names), tuple(inner.statements), ", ".join(results))
    draft.add(body)
    layer, target = f"self.block{number}", f"v{draft.next()}"
    init: tuple[str, ...] = (f"{layer} = {body.name}()",)
    targets: tuple[str, ...] = (target,)
    text, kind = f"{target} = {layer}({', '.join(takes)})", "block"
    way = chosen.random()
    if len(results) == 2:
        targets = (target, f"v{draft.next()}")
        text, kind = f"{', '.join(targets)} = {layer}({', '.join(takes)})", "block of two values"
    elif same and len(takes) == 1 and way < 0.3:
        layers = chosen.randrange(2, 5)
        init = (f"{layer} = nn.ModuleList({body.name}() for _ in range({layers}))",)
        text = f"{target} = {f}\nfor layer in {layer}:\n    {target} = layer({target})"
        kind = "list of blocks"
    elif same and len(takes) == 1 and way < 0.4:
        text, kind = f"{target} = {layer}({layer}({f}))", "shared block"
    elif same and way < 0.5:
        text, kind = f"{target} = {f} + {layer}({', '.join(takes)})", "block and skip"
    elif way < 0.55:
        init = (*init, f"{layer}.eval()")
        kind = "block in evaluation mode"
    elif way < 0.6:
        init = (*init, f"{layer}.requires_grad_(False)")
        kind = "frozen block"
    elif way < 0.63 and len(takes) == 1 and not ONCE & {s.kind for s in inner.statements}:
        text = f"{target} = torch.utils.checkpoint.checkpoint({layer}, {f}, use_reentrant=False)"
        kind = "checkpointed block"
    return drawing.run(Statement(targets, text, init, kind))


FUNCTION = "def criterion(outputs):\n    return {text}"
MODULE = """class criterion(nn.Module):
    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.25))

    def forward(self, outputs):
        return (outputs * self.temperature).square().mean()"""


def _end(
    drawing: Drawing, inputs: dict[str, tuple[Any, ...]], rows: int, length: int
) -> tuple[str, str] | None:
    """The loss of what nobody has read so far, and what the model returns; None without a gradient.

    Some of the values go into the loss beside it, some are returned, others are dead.
    """
    chosen, values = drawing.random, drawing.values
    floats = [n for n in drawing.floats() if values[n].requires_grad and n not in inputs]
    tokens = [n for n in floats if values[n].shape[:2] == (rows, length) and values[n].dim() == 3]
    if not floats:
        return None
    way = chosen.random()
    init: tuple[str, ...] = ()
    if "ids" in inputs and tokens:
        z = tokens[-1]
        width = values[z].shape[-1]
        init = (f"self.head = nn.Linear({width}, 12, bias=False)",)
        embedding = drawing.module._modules.get("wte")
        fits = isinstance(embedding, nn.Embedding) and width == embedding.embedding_dim
        if fits and chosen.random() < 0.4:
            init = (*init, "self.head.weight = self.wte.weight")
        inputs["labels"] = ("tokens", 12, rows, length)
        text = f"loss = F.cross_entropy(self.head({z}).flatten(0, 1), labels.flatten())"
        kind = "language model"
    elif way < 0.3:
        z = floats[-1]
        inputs["labels"] = ("tokens", 5, rows)
        size = values[z].flatten(1).shape[1]
        init = (f"self.head = nn.Linear({size}, 5)",)
        name = chosen.choice(("cross_entropy", "cross_entropy", "multi_margin_loss"))
        text = f"loss = F.{name}(self.head({z}.flatten(1)), labels)"
        kind = "classifier"
    elif way < 0.5:
        z = floats[-1]
        inputs["y"] = ("float", *values[z].shape)
        name = chosen.choice(("mse_loss", "smooth_l1_loss", "l1_loss", "huber_loss"))
        text = f"loss = F.{name}({z}, y)"
        kind = "regression"
    elif way < 0.7:
        text, kind = f"loss = {floats[-1]}.square().mean()", "mean"
    else:
        z = floats[-1]
        module = chosen.random() < 0.35
        if module:
            return z, MODULE
        return z, FUNCTION.format(text="outputs.square().mean()")
    if inputs.get("y", ("", rows))[1] != rows:
        return None
    drawing.values |= {k: v for k, v in _values(inputs).items() if k not in drawing.values}
    try:
        space = {"self": drawing.module, **drawing.case.space, **drawing.values}
        exec("\n".join(init), space)
        exec(text, space)
    except Exception:
        return None
    drawing.statements.append(Statement(("loss",), text, init, kind))
    drawing.used |= names_in(text)
    left = [n for n in floats if n not in drawing.used]
    returned = []
    for name in left:
        if chosen.random() < 0.5:
            more = f"loss = loss + 0.1 * {name}.square().mean()"
            drawing.statements.append(Statement(("loss",), more, (), "sum of losses"))
        elif chosen.random() < 0.4:
            returned.append(name)
    others = [n for n, v in values.items() if isinstance(v, Tensor) and n.startswith("v")]
    if others and chosen.random() < 0.15:
        returned.append(chosen.choice(others))
    if returned or chosen.random() < 0.2:
        pairs = ", ".join(f'"{name}": {name}' for name in dict.fromkeys(returned))
        return f'{{"loss": loss, {pairs}}}', ""
    return "loss", ""


UPDATING = frozenset(("batch norm", "counter", "average"))  # of buffers: once a micro-batch
ONCE = UPDATING | {"dropout", "noise", "Python state"}  # is computed again otherwise, in eager
MESHES = {
    (2, 1, 1): 6, (3, 1, 1): 1, (4, 1, 1): 2, (1, 2, 1): 3, (1, 1, 2): 2, (2, 2, 1): 4,
    (2, 1, 2): 4, (1, 2, 2): 2, (1, 4, 1): 1, (1, 1, 1): 1, (2, 2, 2): 1, (4, 2, 1): 0.5,
}  # fmt: skip
SCHEDULES = {
    "auto": 3, "naive": 1, "gpipe": 2, "1f1b": 3, "interleaved": 2, "zb-h1": 2, "zb-h2": 1,
    "zb-v": 1.5, "v-half": 1, "v-min": 1, "search": 0.5, "pipedream": 2,
}  # fmt: skip
EXPERTS = 0.2  # of the cases have a mixture, where they can
OPTIMIZERS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("SGD", {"lr": 0.05}),
    ("SGD", {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}),
    ("AdamW", {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-4}),
    ("Adam", {"lr": 0.01, "weight_decay": 0.05, "eps": 1e-4}),
)
OF_ROWS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("SGD", {"lr": 0.05}),
    ("SGD", {"lr": 0.05, "momentum": 0.9}),
    ("Adagrad", {"lr": 0.05, "eps": 1e-4}),
)


def _with_memory(number: int, data: int) -> dict[str, Any]:
    """Options of less memory. They have a chance of their own, so that a number still stands for
    the model that it stood for before there were any."""
    chosen, options = random.Random(f"memory of {number}"), {}
    if data > 1 and chosen.random() < 0.6:
        options["zero"] = chosen.choice((1, 2, 3, "auto"))
    if chosen.random() < 0.3:
        options["recompute"] = chosen.choice(("selective", "offload", "auto"))
    return options


def _with_context(case: Case, degrees: dict[str, int]) -> dict[str, int]:
    """Context ranks, instead of tensor ranks, for some models with sequences; with a chance of
    their own, too."""
    chosen = random.Random(f"context of {case.number}")
    count = chosen.choice((2, 2, 2, 3, 4, 5))
    floats = [spec for spec in case.inputs.values() if spec[0] == "float" and len(spec) == 4]
    tokens = [spec for spec in case.inputs.values() if spec[0] == "tokens" and len(spec) == 4]
    lengths = {spec[2] for spec in floats} | {spec[3] for spec in tokens}
    ranks = count * degrees["pipeline"] * degrees["data"]
    fits = any(length % count == 0 for length in lengths)
    return {"context": count, "tensor": 1} if fits and ranks <= 8 and chosen.random() < 0.6 else {}


def _with_options(
    case: Case, chosen: random.Random, language: bool, mesh: tuple[int, int, int]
) -> Case:
    """The case with a mesh, options and an optimizer."""
    pipeline, tensor, data = mesh
    schedule = chosen.choices([*SCHEDULES], [*SCHEDULES.values()])[0]
    exact = (case.dtype, case.options.get("precision")) in _DOUBLE
    if schedule == "pipedream" and not exact:  # it keeps no masters
        schedule = "1f1b"
    if schedule == "pipedream":
        data = 1
    options: dict[str, Any] = {"microbatches": chosen.choice((1, 2, 2, 3, 4, 5))}
    if schedule in ("zb-v", "v-half", "v-min", "interleaved"):
        pipeline = min(pipeline, 2)
    options["schedule"] = schedule
    if schedule == "interleaved" and chosen.random() < 0.3:
        options["virtual_stages"] = chosen.choice((2, 3))
    if language and chosen.random() < 0.6:
        methods = ("whole", "naive", "vocab-1", "vocab-2", "interlaced")
        options["vocabulary"] = chosen.choice(methods)
    if pipeline <= 2 and "list of blocks" in case.kinds and chosen.random() < 0.2:
        options["stages"] = "even"
    if tensor > 1 and chosen.random() < 0.3 and case.weights:
        placement = chosen.choice(("S(0)", "S(0)", "R"))
        options["sharding"] = {chosen.choice(case.weights): placement}
        if chosen.random() < 0.3:
            options["sharding"] = {"*": "R"} | options["sharding"]
    if chosen.random() < 0.5:
        all_of_them = "full" if case.kinds & UPDATING else {"*": True}
        options["recompute"] = chosen.choice(("none", "full", "full", all_of_them))
    options |= _with_memory(case.number, data if schedule != "pipedream" else 1)
    optimizer, values = chosen.choice(OPTIMIZERS)
    if not exact:
        optimizer, values = OPTIMIZERS[chosen.randrange(2)]
    if "sparse table" in case.kinds and chosen.random() < 0.7:  # gradients of rows
        options["optimizer"] = "sgd"
        optimizer, values = chosen.choice(OF_ROWS)
    training = {
        "optimizer": optimizer, "options": values,
        "max_norm": chosen.choice((None, None, 0.1, 1.0)) if schedule != "pipedream" else None,
        "steps": chosen.choice((1, 2, 3)) if exact else 1, "loads": chosen.random() < 0.25,
    }  # fmt: skip
    degrees = {"pipeline": pipeline, "tensor": tensor, "data": data}
    if schedule != "pipedream":
        degrees |= _with_context(case, degrees)
    degrees = {axis: degree for axis, degree in degrees.items() if degree > 1}
    more = case.options | options
    return dataclasses.replace(case, mesh=degrees, options=more, training=training)


def _with_experts(case: Case, values: dict[str, Any]) -> Case:
    """The case with a mixture of stacked experts behind one of its statements, and expert ranks,
    for some; with a chance of their own, so that all else stays as it is."""
    draft = _Draft(f"stacks of {case.number}", 0)
    chosen, degrees, options = draft.random, dict(case.mesh), dict(case.options)
    statements = case.bodies[-1].statements
    places = [
        (k, name)
        for k, statement in enumerate(statements)
        for name in statement.targets
        if _is_float(values.get(name)) and 2 <= values[name].dim() <= 4
        and name in _needed(case.bodies[-1], k)
    ]  # fmt: skip
    if chosen.random() >= EXPERTS or not places or options["schedule"] == "pipedream":
        return case
    if not degrees.keys() & {"data", "context"}:
        degrees["data"] = 2
        if chosen.random() < 0.5:
            options["zero"] = chosen.choice((1, 2, 3, "auto"))
    replicas = degrees.get("data", 1) * degrees.get("context", 1)
    if math.prod(degrees.values()) > 8:
        return case
    ranks = chosen.choice([n for n in range(2, replicas + 1) if replicas % n == 0])
    size = ranks * chosen.choice((1, 2, 2, 3))
    k, name = chosen.choice(places)
    bodies = _mixed(case, draft, k, name, values[name].shape, size)
    found = dataclasses.replace(
        case, bodies=bodies, mesh=degrees | {"expert": ranks}, options=options
    )
    return case if eager(found) else found


def _needed(model: Body, k: int) -> set[str]:
    """The variables that the loss needs behind statement `k` of a model."""
    needed = {"loss"} if "loss" in model.returns else names_in(model.returns)
    for statement in reversed(model.statements[k + 1 :]):
        if needed & set(statement.targets):
            needed |= statement.reads
    return needed


def _mixed(
    case: Case, draft: _Draft, k: int, name: str, shape: Sequence[int], size: int
) -> tuple[Body, ...]:
    """The bodies of a case where a mixture of `size` experts comes behind statement `k` of the
    model; what follows reads its result in place of `name`."""
    chosen, draft._next = draft.random, 900
    exact = (case.dtype, case.options.get("precision")) in _DOUBLE
    lines = mixture(chosen, f"x{draft.next()}", shape, size, exact, draft.next)
    inner = tuple(Statement((line.target,), line.text, line.init, "experts") for line in lines)
    mixed = Body(f"Mixture{draft.next()}", ("x901",), inner, lines[-1].target)
    target, way = f"v{draft.next()}", chosen.random()
    init, text = f"self.mixture = {mixed.name}()", f"{target} = self.mixture({name})"
    if way < 0.25:
        init = f"self.mixture = nn.ModuleList({mixed.name}() for _ in range(2))"
        text = f"{target} = {name}\nfor layer in self.mixture:\n    {target} = layer({target})"
    elif way < 0.28:
        text = f"{target} = self.mixture(self.mixture({name}))"
    elif way < 0.4 and not any("dropout" in line.text for line in lines):
        call = f"torch.utils.checkpoint.checkpoint(self.mixture, {name}, use_reentrant=False)"
        text = f"{target} = {call}"
    model, names = case.bodies[-1], {name: target}
    statements = (
        *model.statements[: k + 1],
        Statement((target,), text, (init,), "mixture"),
        *(statement.renamed(names) for statement in model.statements[k + 1 :]),
    )
    model = Body(model.name, model.takes, statements, renamed(model.returns, names))
    return (*case.bodies[:-1], mixed, model)
