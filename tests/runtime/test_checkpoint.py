"""Checkpoints of one rank: what is saved comes back to the bit, and nothing half is ever loaded."""

import hashlib
import json
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import parcompiler as pc
from parcompiler.runtime import run
from parcompiler.runtime.boxes import Box
from parcompiler.runtime.checkpoint import folder as folders
from parcompiler.runtime.checkpoint import pretrained, saving
from parcompiler.runtime.checkpoint.layout import Part, dealt
from parcompiler.runtime.tensor_files import Described, File, write
from tests.runtime.workers import batch, compiled, mixed
from tests.test_loaded import null_in_a_name, pipe

MICROBATCHES = 2


@pytest.fixture(scope="module")
def program() -> pc.Program:
    return compiled(mixed(0.2), MICROBATCHES)


def worker(program: pc.Program, kind: Any = torch.optim.AdamW, **options: Any) -> pc.Worker:
    found = program.worker()
    found.set_optimizer(kind, **{"lr": 1e-2, **options})
    return found


def trained(found: pc.Worker, steps: int) -> list[float]:
    start = found.step_count
    return [
        found.train_step(batch(MICROBATCHES, seed)).item() for seed in range(start, start + steps)
    ]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        (torch.optim.Adafactor, {}),
        (torch.optim.Rprop, {}),
        (torch.optim.ASGD, {}),
        (torch.optim.NAdam, {}),
        (torch.optim.Adam, {"lr": torch.tensor(1e-2)}),
    ],
)
def test_every_optimizer_goes_on_to_the_bit(
    program: pc.Program, tmp_path: Path, kind: Any, options: dict[str, Any]
) -> None:
    with worker(program, kind, **options) as one:
        trained(one, 2)
        one.save(tmp_path)
        expected = trained(one, 2)
        state = one.gather_state_dict()
    torch.manual_seed(99)
    options = {**options, "lr": torch.tensor(1.0)} if "lr" in options else {**options, "lr": 1.0}
    with worker(program, kind, **options) as two:
        trained(two, 1)
        assert two.load(tmp_path) == 2
        assert trained(two, 2) == expected
        again = two.gather_state_dict()
    assert state is not None
    assert again is not None
    assert all(torch.equal(again[name], state[name]) for name in state)


def test_files_are_opened_by_the_library_and_the_newest_is_found(
    program: pc.Program, tmp_path: Path
) -> None:
    with worker(program) as one:
        trained(one, 1)
        path = one.save(tmp_path, keep=2)
        for _ in range(3):
            trained(one, 1)
            path = one.save(tmp_path, keep=2)
        again = one.save(tmp_path, asynchronous=True)  # of the same step
        trained(one, 1)
        assert one.load(tmp_path) == 4
    assert path.name == "step_00000004"
    assert [p.name for p in folders.complete(tmp_path)] == [
        "step_00000003", "step_00000004", again.name,
    ]  # fmt: skip
    with safe_open(path / "rank_0.safetensors", "pt") as file:
        assert "model/first.weight" in file.keys()
        assert file.get_tensor("optimizer exp_avg/first.weight").shape == (6, 6)
    (path / "SHA256SUMS").unlink()
    assert folders.find(tmp_path).name == again.name


def test_what_is_incomplete_is_not_found_and_goes_with_the_next_save(
    program: pc.Program, tmp_path: Path
) -> None:
    with worker(program) as one:
        path = one.save(tmp_path)
        path.rename(tmp_path / ".step_00000009.partial")
        with pytest.raises(pc.InputError, match="there is no complete one"):
            one.load(tmp_path)
        one.save(tmp_path)
        assert [item.name for item in tmp_path.iterdir()] == ["step_00000000"]


@pytest.mark.parametrize("name", ["rank_0.safetensors", "tensors.json", "checkpoint.json"])
def test_a_damaged_file_is_named_and_nothing_is_loaded(
    program: pc.Program, tmp_path: Path, name: str
) -> None:
    with worker(program) as one:
        path = one.save(tmp_path)
        raw = bytearray((path / name).read_bytes())
        raw[len(raw) // 2] ^= 1
        (path / name).write_bytes(raw)
        losses = trained(one, 1)
        with pytest.raises(pc.InputError, match=rf"{name} is damaged .*: restore it from a copy"):
            one.load(path)
        assert one.step_count == len(losses)


@pytest.mark.parametrize(
    ("name", "damage", "text"),
    [
        ("SHA256SUMS", null_in_a_name, "SHA256SUMS is damaged: restore it from a copy, or load an"),
        ("rank_0.safetensors", pipe, "rank_0.safetensors is a named pipe"),
        ("tensors.json", pipe, "tensors.json is a named pipe"),
    ],
)
def test_what_is_no_list_of_sums_or_no_file_is_damage(
    program: pc.Program, tmp_path: Path, name: str, damage: Callable[[Path], None], text: str
) -> None:
    with worker(program) as one:
        path = one.save(tmp_path)
        damage(path / name)
        with pytest.raises(pc.InputError, match=text):
            one.load(path)
        assert one.step_count == 0


@pytest.mark.parametrize("folder", [3, None, "", "a\0b"])
def test_what_is_no_path_is_refused_and_the_worker_goes_on(
    program: pc.Program, folder: Any
) -> None:
    with worker(program) as one:
        for call in (
            one.save, one.check_folder, one.load, one.load_pretrained, one.save_pretrained,
        ):  # fmt: skip
            with pytest.raises(pc.InputError, match="is no path"):
                call(folder)
        assert one.train_step(batch(MICROBATCHES)).isfinite()


OPTIMIZER = {"kind": "AdamW", "groups": [], "values": {}, "own": []}


def rewritten(path: Path, document: object) -> None:
    """Write a JSON file of a checkpoint anew, with its right sum."""
    path.write_text(json.dumps(document))
    sums = path.with_name("SHA256SUMS")
    others = [x for x in sums.read_text().splitlines() if not x.endswith(path.name)]
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    sums.write_text("\n".join([*others, f"{digest}  {path.name}", ""]))


@pytest.mark.parametrize(
    "changed",
    [
        {"step": "x"},
        {"seeds": []},
        {"calls": [1]},
        {"mesh": 1},
        {"extra": {"data": 1}},
        {"optimizer": []},
        {"optimizer": OPTIMIZER | {"groups": [{"names": ["a"]}]}},
        {"optimizer": OPTIMIZER | {"groups": [{"names": [{}], "options": {}}]}},
        {"optimizer": OPTIMIZER | {"values": {"first.weight": 1}}},
        {"optimizer": OPTIMIZER | {"own": [[1]]}},
    ],
)
def test_facts_of_another_kind_are_damage_though_their_sum_is_right(
    program: pc.Program, tmp_path: Path, changed: dict[str, Any]
) -> None:
    with worker(program) as one:
        path = one.save(tmp_path)
        facts = json.loads((path / "checkpoint.json").read_text())
        rewritten(path / "checkpoint.json", facts | changed)
        with pytest.raises(pc.InputError, match=r"checkpoint.json is damaged: restore it from a"):
            one.load(path)


@pytest.mark.parametrize(
    ("piece", "message"),
    [
        (["rank_0.safetensors", "model/no such key", [0], [5]], "is not what tensors.json says"),
        (["rank_0.safetensors", "model/first.weight", [0], [5]], "is not what tensors.json says"),
        (["rank_0.safetensors", "model/head.bias", [0], [0]], "has not all of .*head.bias"),
    ],
)
def test_an_index_of_other_files_is_refused_before_anything_is_loaded(
    program: pc.Program, tmp_path: Path, piece: list[Any], message: str
) -> None:
    with worker(program) as one:
        path = one.save(tmp_path)
        trained(one, 1)
        index = json.loads((path / "tensors.json").read_text())
        assert index["model/head.bias"]["shape"] == [5]
        rewritten(
            path / "tensors.json",
            index | {"model/head.bias": index["model/head.bias"] | {"pieces": [piece]}},
        )
        before = one.gather_state_dict()
        with pytest.raises(pc.InputError, match=message):
            one.load(path)
        after = one.gather_state_dict()
    assert before is not None
    assert after is not None
    assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("name", ["SHA256SUMS", "checkpoint.json"])
def test_a_run_does_not_go_on_from_before_a_damaged_checkpoint(
    program: pc.Program, tmp_path: Path, name: str
) -> None:
    with worker(program) as one:
        older = one.save(tmp_path)
        trained(one, 1)
        newest = one.save(tmp_path)
        (newest / name).unlink()
        message = rf"{newest} is damaged .*give {older} to go on from that"
        with pytest.raises(pc.InputError, match=message):
            one.load(tmp_path)
        assert one.load(older) == 0
        trained(one, 2)
        later = one.save(tmp_path)  # of a later step than the damaged one
        assert (one.load(tmp_path), later.name) == (2, "step_00000002")


class Counting(torch.optim.SGD):
    """Keeps a number that is of no parameter, and what it is told of each parameter."""

    kept: Any = None

    def step(self, closure: Any = None) -> Any:
        own = cast("dict[Any, Any]", self.state)
        own["count"] = own.get("count", 0) + 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if self.kept is not None:
                    self.state[parameter]["kept"] = self.kept
        return super().step(closure)


class Listing(Counting):
    kept: Any = [torch.ones(2)]  # noqa: RUF012


def test_states_of_an_optimizer_come_back_or_are_refused(
    program: pc.Program, tmp_path: Path
) -> None:
    with worker(program, Counting) as one:
        trained(one, 3)
        one.save(tmp_path)
    with program.worker() as two:
        optimizer = two.set_optimizer(Counting, lr=1e-2)
        two.load(tmp_path)
        assert optimizer.state["count"] == 3  # type: ignore[index]
    with worker(program, Listing) as three:
        trained(three, 1)
        message = r"state 'kept' of '.*' is or holds a tensor.*save with optimizer=False"
        with pytest.raises(pc.InputError, match=message):
            three.save(tmp_path / "lists")
        path = three.save(tmp_path / "lists", optimizer=False)
        with pytest.warns(UserWarning, match="no optimizer states"):
            assert three.load(path) == 1


def test_a_group_of_new_parameters_keeps_its_options(tmp_path: Path) -> None:
    """As layers are unfrozen one after the other, groups get other numbers."""
    model = mixed()
    with worker(compiled(model, MICROBATCHES), torch.optim.SGD) as one:
        one.set_optimizer(torch.optim.SGD, lr=1e-3, groups=[("head.*", {"lr": 1.0})])
        one.save(tmp_path)
    model.frozen.requires_grad_(True)
    groups = [("frozen.*", {"lr": 1e-5}), ("head.*", {"lr": 2.0}), ("norm.*", {"lr": 3.0})]
    with worker(compiled(model, MICROBATCHES)) as two:
        optimizer = two.set_optimizer(torch.optim.SGD, lr=1.0, groups=groups)
        two.load(tmp_path)
        assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 1e-5, 1.0, 1e-3]


def test_masters_are_loaded_whether_a_loss_is_scaled_or_not(tmp_path: Path) -> None:
    single, half = (compiled(mixed(), MICROBATCHES, precision=x) for x in (None, "fp16"))
    with worker(half) as one:
        trained(one, 1)
        one.save(tmp_path)
    with worker(single) as two:
        assert two.load(tmp_path) == 1
        trained(two, 1)
        two.save(tmp_path)
    with worker(half) as three:
        assert three.load(tmp_path) == 2
        assert torch.tensor(trained(three, 1)).isfinite().all()


@pytest.mark.parametrize(("before", "after"), [("bf16", "fp64"), ("fp64", "bf16")])
def test_states_have_the_precision_of_their_weights(
    tmp_path: Path, before: str, after: str
) -> None:
    data = batch(MICROBATCHES)
    for precision in (before, after):
        x = data["x"].double() if precision == "fp64" else data["x"]
        with worker(compiled(mixed(), MICROBATCHES, precision=precision)) as one:
            if precision == after:
                one.load(tmp_path)
            one.train_step(data | {"x": x})
            for weight, states in one._updates.optimizer.state.items():
                assert states["exp_avg"].dtype == weight.dtype
                assert states["step"].item() == one.step_count
            one.save(tmp_path)


def test_a_full_disk_is_said_at_the_next_call_and_at_close(
    program: pc.Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> str:
        raise OSError(28, "No space left on device")

    one = worker(program)
    one.save(tmp_path)
    monkeypatch.setattr(saving, "write", full)
    with pytest.raises(pc.InputError, match=r"write .*/step_00000000-2:\nrank 0: No space left on"):
        one.save(tmp_path)
    with pytest.raises(pc.InputError, match="rank 0: No space left on device"):
        one.save_pretrained(tmp_path / "weights")
    assert [*(tmp_path / "weights").iterdir()] == []
    one.save(tmp_path, asynchronous=True)
    trained(one, 1)
    with pytest.raises(pc.InputError, match=r"step_00000000-2, was not written:\nrank 0: No sp"):
        one.load(tmp_path)
    assert one.load(tmp_path) == 0
    one.save(tmp_path, asynchronous=True)
    with pytest.raises(pc.InputError, match="step_00000000-2, was not written: No space left"):
        one.close()
    assert {item.name for item in tmp_path.iterdir()} == {"step_00000000", "weights"}


class Counter:
    """Has a state."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


STATE = {
    "a": 1, 2: (3.5, None), "b": [True, b"\x00"], "nested": {"tensor": "no tensor"},
    "t": torch.arange(3), "none": torch.zeros(0, 2), "nan": float("inf"),
}  # fmt: skip


def test_states_of_objects_come_back_and_others_are_refused_by_name(
    program: pc.Program, tmp_path: Path
) -> None:
    with worker(program) as one:
        one.save(tmp_path, {"counter": Counter(STATE)})
        found = Counter(None)
        one.load(tmp_path, {"counter": found})
        assert repr(found.state) == repr(STATE)
        with pytest.raises(pc.InputError, match=r"no extra 'other' \(it has: counter\)"):
            one.load(tmp_path, {"other": found})
        odd = {"list": [Counter(1)]}
        with pytest.raises(pc.InputError, match=r"extra 'counter'\['list'\]\[0\] is .*\(Counter\)"):
            one.save(tmp_path, {"counter": Counter(odd)})
        with pytest.raises(pc.InputError, match=r"extra 'x' has no state_dict\(\) \(int\)"):
            one.save(tmp_path, {"x": 3})
        with pytest.raises(pc.InputError, match=r"keep must be .* \(0 given\)"):
            one.save(tmp_path, keep=0)


def test_other_optimizers_and_models_are_refused(program: pc.Program, tmp_path: Path) -> None:
    with worker(program) as one:
        trained(one, 1)
        one.save(tmp_path)
    with program.worker() as two:
        with pytest.raises(pc.InputError, match=r"call worker\.set_optimizer first"):
            two.load(tmp_path)
        two.set_optimizer(torch.optim.SGD, lr=1.0)
        with pytest.raises(pc.InputError, match="states of AdamW, this worker has SGD"):
            two.load(tmp_path)
        assert two.load(tmp_path, optimizer=False) == 1
    model = mixed()
    model.head = torch.nn.Linear(6, 7)
    model.more = torch.nn.Linear(2, 2)
    with worker(compiled(model, MICROBATCHES)) as three, pytest.raises(pc.InputError) as error:
        three.load(tmp_path)
    assert "'head.weight' has another shape ((7, 6) needed, (5, 6) stored)" in str(error.value)


def test_a_script_goes_on_from_its_newest_checkpoint(
    program: pc.Program, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    run(program.worker, ["--steps", "5"])
    straight = capsys.readouterr().out.splitlines()
    arguments = ["--save", str(tmp_path / "run"), "--every", "2", "--resume", "auto", "--keep", "2"]
    torch.manual_seed(0)
    run(program.worker, ["--steps", "3", *arguments])
    assert capsys.readouterr().out.splitlines() == straight[:3]
    torch.manual_seed(5)
    run(program.worker, ["--steps", "5", *arguments])
    resumed, *lines = capsys.readouterr().out.splitlines()
    assert resumed == f"going on from step 3 of {tmp_path / 'run' / 'step_00000003'}"
    assert lines == straight[3:]
    names = [path.name for path in folders.complete(tmp_path / "run")]
    assert names == ["step_00000004", "step_00000005"]
    for wrong in (["--every", "2"], ["--resume", "auto"], ["--keep", "1"]):
        with pytest.raises(pc.InputError, match="needs --save DIR"):
            run(program.worker, wrong)


def test_sigterm_saves_and_ends_with_143(
    program: pc.Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(timeout: float) -> pc.Worker:
        found = program.worker()
        step = found.train_step

        def terminated(data: object) -> torch.Tensor:
            if found.step_count == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return step(data)

        monkeypatch.setattr(found, "train_step", terminated)
        return found

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as end:
        run(make, ["--save", str(tmp_path)])
    assert end.value.code == 143
    assert folders.find(tmp_path).name == "step_00000002"
    assert signal.getsignal(signal.SIGTERM) is before


def test_boxes_overlap_as_indices_do() -> None:
    whole = torch.arange(6 * 7 * 2).view(6, 7, 2)
    one, two = Box((1, 0, 0), (4, 5, 2)), Box((3, 2, 1), (3, 5, 1))
    common = one.overlap(two)
    assert torch.equal(common.within(one).of(one.of(whole)), whole[3:5, 2:5, 1:])
    assert torch.equal(common.within(two).of(two.of(whole)), whole[3:5, 2:5, 1:])
    assert one.overlap(Box((5, 0, 0), (1, 1, 1))).count == 0
    assert Box.whole(()).count == 1


def test_replicas_share_what_they_write() -> None:
    big, small = torch.zeros(101, 1000), torch.zeros(3)
    parts = {"big": [Part(Box.whole(big.shape), big)], "small": [Part(Box.whole((3,)), small)]}
    found = dealt(parts, 4)
    rows = sorted(p.box.offsets[0] for rank in found for name, p in rank if name == "big")
    assert rows == [0, 26, 51, 76]
    assert sum(p.box.count for rank in found for _, p in rank) == big.numel() + 3


def test_safetensors_are_read_by_boxes_in_another_dtype(tmp_path: Path) -> None:
    tensors = {
        "c": torch.randn(3, 2, dtype=torch.complex128),
        "b": torch.tensor(True),
        "h": torch.randn(5, 4).half(),
        "o": torch.arange(3, dtype=torch.uint8),
        "e": torch.zeros(0, 3),
    }
    path = tmp_path / "x.safetensors"
    write(path, {name: Described.of(tensor) for name, tensor in tensors.items()}, {})
    file = File(path)
    for name, tensor in tensors.items():
        target = torch.empty_like(tensor)
        file.read(name, Box.whole(tensor.shape), target)
        assert torch.equal(target, tensor)
    wide = torch.empty(2, 2)
    file.read("h", Box((1, 2), (2, 2)), wide)
    assert torch.equal(wide, tensors["h"][1:3, 2:].float())
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(pc.InputError, match="is cut short"):
        File(path)


def test_both_names_of_a_tied_tensor_have_one_value(program: pc.Program, tmp_path: Path) -> None:
    assert isinstance(program.model, torch.nn.Module)
    state = {name: tensor.clone() for name, tensor in program.model.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    with worker(program) as one:
        one.load_pretrained(tmp_path)
        state["twin.weight"] += 1
        save_file(state, tmp_path / "model.safetensors")
        message = "'first.weight' and 'twin.weight' are one tensor of the model, and differ"
        with pytest.raises(pc.InputError, match=message):
            one.load_pretrained(tmp_path)


def test_names_with_and_without_the_model_around_them() -> None:
    known = ["transformer.h.0.w", "transformer.wte", "head"]
    assert pretrained.renamed(["h.0.w", "wte", "head"], known)["wte"].name == "transformer.wte"
    assert pretrained.renamed(["h.0.w", "wte", "head"], known)["head"].name == "head"
    more = pretrained.renamed(["model.h.0.w", "model.wte"], ["h.0.w", "wte"])
    assert [place.name for place in more.values()] == ["h.0.w", "wte"]


def test_an_index_that_leaves_its_folder_is_refused(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "../outside.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(pc.InputError, match="no map of names to files of its folder"):
        pretrained.opened(tmp_path)
    with pytest.raises(pc.InputError, match="has no published weights"):
        pretrained.opened(tmp_path / "none")


class Stream(torch.utils.data.IterableDataset[dict[str, torch.Tensor]]):
    """Batches that can only be read on."""

    def __init__(self) -> None:
        self.taken = 0

    def __iter__(self) -> Any:
        while True:
            self.taken += 1
            yield batch(MICROBATCHES, self.taken)

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.taken = state["taken"]


@pytest.mark.filterwarnings("ignore:.set_vital. is deprecated")  # which torchdata calls
def test_a_loader_of_torchdata_goes_on_behind_the_batch_that_was_trained(
    program: pc.Program, tmp_path: Path
) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    def train(found: pc.Worker, loader: Any, steps: int) -> list[float]:
        batches = iter(loader)
        return [found.train_step(next(batches)).item() for _ in range(steps)]

    with worker(program) as one:
        straight = train(one, stateful(Stream(), batch_size=None), 5)
    with worker(program) as one:
        loader = stateful(Stream(), batch_size=None)
        assert train(one, loader, 2) == straight[:2]
        one.save(tmp_path, {"loader": loader})
    with worker(program) as two:
        loader = stateful(Stream(), batch_size=None)
        two.load(tmp_path, {"loader": loader})
        assert train(two, loader, 3) == straight[2:]


def test_ranks_tell_each_other_names_once_and_then_a_few_numbers(
    program: pc.Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: list[str] = []
    with worker(program) as one:
        gather = one._channels.gather_values

        def gathered(value: object) -> list[Any]:
            texts.append(json.dumps(value))
            return gather(value)

        monkeypatch.setattr(one._channels, "gather_values", gathered)
        trained(one, 1)
        one.save(tmp_path)
        name = next(name for name, _ in one.named_parameters())
        assert sum(f'"{name}"' in text for text in texts) == 1
        texts.clear()
        one.save(tmp_path)
        assert not any(name in text for text in texts)
        assert 0 < sum(map(len, texts)) < 400 + len(str(tmp_path))


@contextmanager
def full_disk() -> Iterator[None]:
    """Within it, no file can have more than a few bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_loses_no_older_checkpoint_and_no_older_weights(
    program: pc.Program, tmp_path: Path
) -> None:
    run, weights = tmp_path / "run", tmp_path / "weights"
    with worker(program) as one:
        trained(one, 1)
        one.save(run)
        one.save_pretrained(weights, {})
        stored = (weights / "model.safetensors").read_bytes()
        trained(one, 1)
        with full_disk():
            with pytest.raises(pc.InputError, match="File too large"):
                one.save(run, keep=1)
            with pytest.raises(pc.InputError, match="File too large"):
                one.save_pretrained(weights, {})
            one.save(run, asynchronous=True, keep=1)
            one._checkpoints._thread.join()  # type: ignore[union-attr]
        with pytest.raises(pc.InputError, match=r"the last checkpoint, .*, was not written"):
            one.save(run)
        assert [path.name for path in run.iterdir()] == ["step_00000001"]
        assert folders.damaged(folders.find(run)) == []
        assert (weights / "model.safetensors").read_bytes() == stored
        trained(one, 1)
        one.save(run, keep=1)
        assert [path.name for path in run.iterdir()] == ["step_00000003"]
