"""Tables that are looked up with sparse=True: gradients are rows, and steps are those of torch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import parcompiler as pc
from parcompiler.verification.pool import Job, pool

ROWS, MICROBATCHES = 6, 2
TABLES = ("items.weight", "bags.weight", "padded.weight")


class Recommender(nn.Module):
    """Three large tables and one of five rows, which a step looks up more often than it has."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(1000, 8, sparse=True)
        self.bags = nn.EmbeddingBag(2000, 8, mode="sum", sparse=True)
        self.padded = nn.Embedding(600, 8, sparse=True, padding_idx=3)
        self.small = nn.Embedding(5, 8, sparse=True)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 1)

    def forward(self, item: Tensor, bag: Tensor, wanted: Tensor) -> Tensor:
        x = self.items(item) + self.bags(bag) + self.padded(item % 600) + self.small(item % 5)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return F.mse_loss(self.head(x).squeeze(-1), wanted)


def made() -> Recommender:
    torch.manual_seed(0)
    return Recommender().double()


def batch_of(rows: int, seed: int = 0) -> dict[str, Tensor]:
    """Items that come up several times, the padding among them."""
    generator = torch.Generator().manual_seed(seed)
    item = torch.randint(40, (rows,), generator=generator)
    bag = torch.randint(2000, (rows, 4), generator=generator)
    return {"item": item, "bag": bag, "wanted": torch.randn(rows, generator=generator).double()}


def compiled(mesh: pc.Mesh | pc.Cluster, **options: Any) -> pc.Program:
    named = {"optimizer": "sgd", "microbatches": MICROBATCHES, **options}
    return pc.compile(made(), mesh, batch_of(ROWS), **named)


def whole_gradients(program: pc.Program) -> set[str]:
    return {item.name for item in program.lowered.graph.parameters if not item.looked_up}


def pinned(placement: str) -> dict[str, str]:
    return dict.fromkeys(TABLES, placement)


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        (pc.Mesh(), {}),
        (pc.Mesh(data=2), {"recompute": "full"}),
        (pc.Mesh(tensor=2), {"sharding": pinned("S(0)")}),
        (pc.Mesh(tensor=2, data=2), {"sharding": pinned("S(1)")}),
        (pc.Mesh(pipeline=2, data=2), {"schedule": "zb-h1"}),
        (pc.Mesh(pipeline=2), {"vocabulary": "vocab-1", "optimizer": "adagrad"}),
    ],
)
def test_gradients_of_rows_are_those_of_one_process(mesh: pc.Mesh, options: Any) -> None:
    program = compiled(mesh, **options)
    assert whole_gradients(program).isdisjoint(TABLES)
    assert "small.weight" in whole_gradients(program)
    found = program.verify()
    assert found.ok, str(found)
    assert found.native.dtype == "float64"


def test_layers_without_such_tables_are_compiled() -> None:
    torch.manual_seed(0)
    batch = {key: t.float() if t.is_floating_point() else t for key, t in batch_of(ROWS).items()}
    mesh = pc.Mesh(data=2)
    program = pc.compile(Recommender(), mesh, batch, microbatches=2, optimizer="sgd")
    found = program.verify(compiled=True)
    assert found.ok, str(found)


@pytest.mark.parametrize(
    ("optimizer", "rates", "max_norm"),
    [("SGD", {"lr": 0.1, "momentum": 0.9}, None), ("Adagrad", {"lr": 0.1}, 0.05)],
)
def test_steps_are_those_of_torch_with_sparse_gradients(
    optimizer: str, rates: dict[str, Any], max_norm: float | None, tmp_path: Path
) -> None:
    data = 2
    program = compiled(pc.Mesh(data=data))
    program.export(tmp_path / "out")
    batches = [batch_of(ROWS * MICROBATCHES * data, seed) for seed in range(3)]
    job = Job(str(tmp_path / "out"), batches, optimizer=optimizer, options=rates, max_norm=max_norm)
    state = pool().run(job, data).state

    reference = made()
    stepping = getattr(torch.optim, optimizer)(reference.parameters(), **rates)
    for batch in batches:
        parts = MICROBATCHES * data
        for i in range(parts):
            (reference(**{k: t.chunk(parts)[i] for k, t in batch.items()}) / parts).backward()
        assert reference.items.weight.grad is not None
        assert reference.items.weight.grad.is_sparse
        if max_norm is not None:  # torch clips no sparse gradients
            for parameter in reference.parameters():
                assert parameter.grad is not None
                parameter.grad = parameter.grad.to_dense()
            nn.utils.clip_grad_norm_(reference.parameters(), max_norm)
        stepping.step()
        stepping.zero_grad()
    for key, parameter in reference.named_parameters():
        error = (state[key] - parameter.detach()).norm() / parameter.detach().norm()
        assert error <= 1e-9, key


@pytest.mark.parametrize(
    ("optimizer", "rates", "said"),
    [
        ("Adam", {"lr": 0.1}, "Adam changes rows that a step did not look up"),
        ("SGD", {"lr": 0.1, "weight_decay": 0.1}, "weight_decay changes rows"),
        ("SGD", {"lr": 0.1, "fused": True}, "torch's fused SGD takes no gradients of rows"),
        ("SparseAdam", {"lr": 0.1}, "SparseAdam steps tables alone"),
    ],
)
def test_optimizers_that_change_other_rows_are_refused(
    optimizer: str, rates: dict[str, Any], said: str
) -> None:
    with compiled(pc.Mesh()).worker() as worker, pytest.raises(pc.InputError, match=said):
        worker.set_optimizer(getattr(torch.optim, optimizer), **rates)


def test_rows_take_less_memory() -> None:
    model = made()
    for table in (model.items, model.bags, model.padded):
        table.sparse = False
    rows, whole = (
        pc.compile(x, pc.Mesh(), batch_of(ROWS), optimizer="sgd", microbatches=MICROBATCHES)
        for x in (made(), model)
    )
    looked_up = {x.name: x.looked_up for x in rows.lowered.graph.parameters if x.looked_up}
    assert looked_up == {"items.weight": 12, "bags.weight": 48, "padded.weight": 12}
    assert whole_gradients(whole).issuperset(looked_up)
    tables = 8 * 8 * (1000 + 2000 + 600)
    mine, others = (program.simulate() for program in (rows, whole))
    assert others.peak_memory[0] - mine.peak_memory[0] > 0.95 * tables
    assert mine.peak_memory[0] > tables + 8 * (8 + 1) * sum(looked_up.values())
    report = rows.report().to_text()
    assert "at most 72 rows of 3,600 in a step, of 3 tables" in " ".join(report.split())


@pytest.mark.parametrize(
    "options", [{"optimizer": "adamw"}, {"zero": 1}, {"precision": "bf16"}, {"compression": "bf16"}]
)
def test_other_plans_have_gradients_of_all_rows(
    options: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    program = compiled(pc.Mesh(data=2), **options)
    assert whole_gradients(program).issuperset(TABLES)
    assert "gradients of tables with sparse=True (4: items.weight, ...)" in capsys.readouterr().err


def test_a_search_weighs_rows() -> None:
    program = compiled(pc.Cluster(1, 4, "cpu"))
    assert whole_gradients(program).isdisjoint(TABLES)
    assert program.verify().ok
