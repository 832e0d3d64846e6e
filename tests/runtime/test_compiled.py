"""Layers through torch.compile's compiler: what is compiled, and that nothing changes by it."""

import operator
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

import parcompiler as pc
from parcompiler import runtime
from parcompiler.instruction import Kind
from parcompiler.models import bert, gpt, llama, resnet, t5
from parcompiler.runtime import Worker
from parcompiler.runtime.compiled.layers import CompiledLayer, Finder, Surroundings, Template
from parcompiler.runtime.script import run
from parcompiler.runtime.training import optimizer_of
from tests import zoo

CPU = torch.device("cpu")


class Block(nn.Module):
    """Dropout, a norm and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.linear = nn.Linear(6, 6)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.linear(self.norm(x).tanh()))
        return x


class Stack(nn.Module):
    """Four blocks: the input of the first carries no gradient, the loss is a part of the last."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        loss: torch.Tensor = x.square().mean()
        return loss


@pytest.fixture(scope="module")
def program() -> pc.Program:
    torch.manual_seed(0)
    return pc.compile(
        Stack(), pc.Mesh(), {"x": torch.randn(4, 6)}, microbatches=2, schedule="zb-h1",
        recompute={"layers.0": True}, precision="fp64",
    )  # fmt: skip


def trained(worker: Worker) -> dict[str, torch.Tensor]:
    """The state after two steps, with their losses."""
    generator = torch.Generator().manual_seed(1)
    worker.set_optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
    batches = [torch.randn(8, 6, generator=generator, dtype=torch.float64) for _ in range(2)]
    losses = [worker.train_step({"x": batch}) for batch in batches]
    state = worker.gather_state_dict()
    assert state is not None
    return state | {"losses": torch.stack(losses)}


def counting(worker: Worker) -> Counter[str]:
    """How often each template of a worker is called from now on."""
    counts: Counter[str] = Counter()

    def counted(key: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*inputs: torch.Tensor) -> Any:
            counts[key] += 1
            return function(*inputs)

        return call

    assert worker.compiled is not None
    for template in worker.compiled.templates[True]:
        assert template.function is not None
        template.function = counted(template.key, template.function)
    return counts


def test_equal_layers_are_compiled_once_and_train_as_they_do_without(program: pc.Program) -> None:
    lines = program.rank_program(0).instructions
    assert any(line.kind is Kind.BACKWARD_WEIGHT for line in lines)
    torch.manual_seed(3)  # of the dropout
    with program.worker() as worker:
        eager = trained(worker)
    torch.manual_seed(3)
    counters = torch._dynamo.utils.counters["inductor"]
    with program.worker(compiled=True) as worker:
        assert worker.compiled is not None
        templates = worker.compiled.templates[True]
        first, block, last = templates
        before = +counters
        assert (first.count, block.count, last.count) == (1, 2, 1)
        assert len(block.extras) == 2  # what dropout draws; where the product is left
        counts = counting(worker)
        compiled = trained(worker)
        # In each of two steps of two micro-batches; once more where it is recomputed.
        calls = [counts[template.key] for template in templates]
        assert calls == [2 * 2 * 2, 2 * 2 * 2, 2 * 2]
        assert before == +counters  # nothing was compiled within the steps
    assert eager.keys() == compiled.keys()
    for name, tensor in eager.items():
        assert torch.allclose(compiled[name], tensor, rtol=1e-9, atol=1e-12), name


@pytest.mark.parametrize("rank", [0, 1])
def test_zeros_of_a_rank_depend_on_the_value_where_they_are_traced(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks whose graphs depend on other values do their collectives in another order."""
    monkeypatch.setattr("parcompiler.runtime.tensor.tracing.active", object)
    monkeypatch.setattr(
        "parcompiler.runtime.tensor.current", lambda axis: SimpleNamespace(rank=rank)
    )
    x = torch.tensor([1.5, float("nan"), float("inf")])
    graph = make_fx(lambda x: runtime.first(x), select_decomp_table())(x)
    graph.graph.eliminate_dead_code()
    (value,) = (node for node in graph.graph.nodes if node.op == "placeholder")
    assert value.users
    expected = torch.zeros(3) if rank else x
    torch.testing.assert_close(graph(x), expected, equal_nan=True, rtol=0, atol=0)


def not_compiled(graph: torch.fx.GraphModule, _: object, **options: object) -> Callable[..., Any]:
    """Instead of Inductor: the graph that it is given, as it is."""

    def call(inputs: list[Any]) -> Any:
        return graph.forward(*inputs)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def kept_bytes(template: Template, inputs: Sequence[torch.Tensor], results: Any) -> int:
    """Memory that the backward of a call keeps, apart from what it was given: but draws count."""
    (node,) = {id(x.grad_fn): x.grad_fn for x in results if x.grad_fn is not None}.values()
    given = inputs[: len(template.arguments) + len(template.tensors)]
    known = {x.untyped_storage()._cdata for x in given}
    kept = {x.untyped_storage()._cdata: x.untyped_storage() for x in node.saved_tensors}
    return sum(memory.nbytes() for place, memory in kept.items() if place not in known)


@pytest.mark.parametrize(
    ("name", "recompute"), [("gpt", "selective"), ("t5", "selective"), ("llama", "none")]
)
def test_compiled_layers_keep_at_most_what_is_predicted(
    name: str, recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with warnings.catch_warnings():  # of torch, about itself
        warnings.simplefilter("ignore")
        monkeypatch.setattr("torch._inductor.compile_fx.compile_fx_inner", not_compiled)
    torch.manual_seed(0)
    model, inputs = text_model(name, layers=2)
    program = pc.compile(model, pc.Mesh(), inputs, microbatches=1, recompute=recompute)
    selective = program.plan.selective
    assert selective == (recompute == "selective")
    priced = program.problem.selectively(selective).priced(program.plan.granularity or 0)
    layers = [
        cost.saved for block, cost in zip(priced.cut.blocks, priced.costs, strict=True)
        if block.name.partition(".")[0].endswith("layers")
    ]  # fmt: skip
    kept: list[int] = []
    with program.worker(compiled=True) as worker:
        assert worker.compiled is not None
        for template in worker.compiled.templates[True]:
            if "Layer" in str(template):
                assert template.function is not None
                template.function = noting(template, template.function, kept)
        worker.step(inputs)
    assert len(kept) == len(layers)
    if selective:
        assert sorted(kept) == sorted(layers)
    assert all(map(operator.le, kept, layers))


def noting(template: Template, function: Callable[..., Any], kept: list[int]) -> Callable[..., Any]:
    """The function of a template, which notes what each call keeps."""

    def call(*inputs: torch.Tensor) -> Any:
        results = function(*inputs)
        kept.append(kept_bytes(template, inputs, results))
        return results

    return call


class Layer(runtime.Layer):
    """What a stage of one layer computes, by `compute`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.compute(x)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """Something."""
        return x


class Reading(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[: int(x.sum())]


class Drawing(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.bernoulli(x)


class One(runtime.Stage):
    """A stage of one layer."""

    inputs = ("x",)

    def __init__(self, layer: runtime.Layer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (
            Reading(),
            r"^Reading of test_compiled\.py, line \d+ \(`return x\[: int\(x\.sum\(\)\)\]`\) cannot "
            r"be compiled \(DataDependentOutputException: .*\): run without compiled=True$",
        ),
        (Drawing(), r"line \d+ \(`return torch\.bernoulli\(x\)`\).* depend on values\)"),
    ],
)
def test_what_cannot_be_compiled_is_named_with_its_line(
    program: pc.Program, layer: Layer, message: str
) -> None:
    finder = Finder(program.rank_program(0), Surroundings(CPU))
    with pytest.raises(pc.LaunchError, match=message):
        finder.run(One(layer), [CompiledLayer(layer)], split=False)


def test_without_a_compiler_nothing_starts(
    program: pc.Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch._inductor.cpp_builder
    from torch._inductor.exc import InvalidCxxCompiler

    def missing() -> str:
        raise InvalidCxxCompiler

    monkeypatch.setattr(torch._inductor.cpp_builder, "get_cpp_compiler", missing)
    with pytest.raises(pc.LaunchError, match=r"^compiled=True needs a C\+\+ compiler.*install g"):
        program.worker(compiled=True)
    assert not torch.distributed.is_initialized()


def test_scripts_compile_as_exported_unless_they_are_told_otherwise(
    program: pc.Program, tmp_path: Path
) -> None:
    program.export(tmp_path / "out", compiled=True)
    assert "compiled: bool = True" in (tmp_path / "out" / "rank_0.py").read_text()
    program.export(tmp_path / "out")
    assert "compiled: bool = False" in (tmp_path / "out" / "rank_0.py").read_text()
    asked: list[dict[str, bool]] = []

    def make(timeout: float, **options: bool) -> Worker:
        asked.append(options)
        raise KeyboardInterrupt

    for words in ([], ["--compile"], ["--no-compile"]):
        with pytest.raises(KeyboardInterrupt):
            run(make, words)
    assert asked == [{}, {"compiled": True}, {"compiled": False}]


@pytest.fixture
def cold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache of its own."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    yield tmp_path
    shutil.rmtree(tmp_path, ignore_errors=True)


@pytest.mark.sweep
def test_what_a_worker_compiles_is_left_on_disk_for_the_next(
    program: pc.Program, cold: Path
) -> None:
    from torch._dynamo.utils import counters

    def looked_up() -> list[int]:
        found = [counters["inductor"][f"fxgraph_cache_{way}"] for way in ("miss", "hit")]
        counters.clear()
        return found

    looked_up()
    with program.worker(compiled=True) as worker:
        assert worker.compiled is not None
        number = len(worker.compiled.templates[True])
        missed, found = looked_up()  # forwards of two templates may be the same graph
        assert missed > number
        assert missed + found == 2 * number
    with program.worker(compiled=True):
        assert looked_up() == [0, 2 * number]


@pytest.mark.sweep
def test_evaluations_are_compiled_too(program: pc.Program) -> None:
    batch = {"x": torch.randn(8, 6, dtype=torch.float64)}
    with program.worker() as worker:
        eager = worker.evaluate(batch)
    with program.worker(compiled=True) as worker:
        assert torch.allclose(worker.evaluate(batch), eager, rtol=1e-12)
        assert worker.compiled is not None
        assert {True, False} == worker.compiled.templates.keys()


def text_model(name: str, **options: Any) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A small model and its micro-batch."""
    module = {"gpt": gpt, "llama": llama, "bert": bert, "t5": t5}[name]
    sizes = {"layers": 4, "heads": 2, "hidden": 32, "vocabulary": 64, "sequence": 16, **options}
    kind = {"gpt": "GPT", "llama": "Llama", "bert": "BERT", "t5": "T5"}[name]
    model = getattr(module, kind)(module.Config(**sizes))
    tokens = torch.randint(64, (2, 16))
    more = {"decoder_tokens": tokens} if name == "t5" else {}
    return model, {"tokens": tokens, **more, "labels": tokens.roll(1, 1)}


PIECES = {
    "*.qkv.weight": "S(0)",
    "*.out.weight": "S(1)",
    "*.up.weight": "S(0)",
    "*.down.weight": "S(1)",
}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "split": ({"pipeline": 2}, {"schedule": "zb-h1"}, {"dropout": 0.1}),
    "recomputed": ({"pipeline": 2}, {"schedule": "zb-h1", "recompute": "full"}, {"dropout": 0.1}),
    "tensor": ({"tensor": 2}, {"sharding": PIECES}, {"dropout": 0.1, "vocabulary": 97}),
    "selective": (
        {"pipeline": 2},
        {"schedule": "zb-h1", "recompute": "selective"},
        {"dropout": 0.1},
    ),
    "selective tensor": (
        {"tensor": 2},
        {"sharding": PIECES, "recompute": "selective"},
        {"vocabulary": 97},
    ),
    "context": ({"context": 2}, {"recompute": "full"}, {"dropout": 0.1}),
    "zero": ({"data": 2}, {"zero": 3}, {}),
    "vocabulary": ({"pipeline": 2}, {"vocabulary": "vocab-2"}, {}),
    "bf16": ({"pipeline": 2}, {"precision": "bf16"}, {}),
    "fp16": ({"pipeline": 2}, {"precision": "fp16"}, {}),
    "pipedream": ({"pipeline": 2}, {"schedule": "pipedream"}, {"tied": False}),
    "interleaved": ({"pipeline": 2}, {"schedule": "interleaved"}, {}),
}


@pytest.mark.sweep
@pytest.mark.parametrize("case", CASES)
def test_compiled_programs_equal_the_model(case: str) -> None:
    mesh, options, sizes = CASES[case]
    torch.manual_seed(0)
    model, inputs = text_model("gpt", **sizes)
    program = pc.compile(model, pc.Mesh(**mesh), inputs, microbatches=4, **options)
    assert program.plan.selective == case.startswith("selective")
    verification = program.verify(compiled=True)
    assert verification.ok, verification


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["llama", "bert", "t5", "hf-gpt2", "hf-llama"])
def test_compiled_models_equal_themselves(name: str) -> None:
    torch.manual_seed(0)
    model, inputs = zoo.build(name) if name.startswith("hf-") else text_model(name)
    verification = pc.compile(model, pc.Mesh(pipeline=2), inputs).verify(compiled=True)
    assert verification.ok, verification


class Scaled(nn.Module):
    """A number of the first layer scales the result of the second."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        scale = x.square().mean()
        loss: torch.Tensor = (self.layers[1](x.tanh()) * scale).square().mean()
        return loss


def test_a_stage_that_receives_a_number_is_compiled() -> None:
    torch.manual_seed(0)
    program = pc.compile(
        Scaled(), pc.Mesh(pipeline=2), (torch.randn(4, 6),), microbatches=1, schedule="1f1b"
    )
    assert () in {value.shape for value in program.lowered.values.values()}
    verification = program.verify(compiled=True)
    assert verification.ok, verification


@pytest.mark.sweep
def test_a_compiled_resnet_equals_itself() -> None:
    torch.manual_seed(0)
    model = resnet.ResNet(resnet.PRESETS["tiny"])
    inputs = (torch.randn(2, 3, 32, 32), torch.randint(10, (2,)))
    verification = pc.compile(model, pc.Mesh(data=2), inputs).verify(compiled=True)
    assert verification.ok, verification


def test_scripts_step_in_fused_kernels_where_layers_are_compiled() -> None:
    given: list[bool] = []

    def set_optimizer(kind: type[torch.optim.Optimizer], **options: Any) -> None:
        assert kind is torch.optim.AdamW
        given.append(options.get("fused", False))

    options: Any = SimpleNamespace(
        weight_decay=None, max_norm=1.0, lr=0.1, error_if_nonfinite=False
    )
    for layers in (None, object()):
        worker: Any = SimpleNamespace(device=CPU, compiled=layers, set_optimizer=set_optimizer)
        optimizer_of(worker, options)
    assert given == [False, True]
