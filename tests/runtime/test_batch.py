"""Batches: cut into micro-batches, and refused when the model was compiled for others."""

import math
import re
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import parcompiler as pc
from parcompiler.runtime import Input, RankProgram
from parcompiler.runtime.agreement import WorkerCall, difference_of_calls, digest_of_batch
from parcompiler.runtime.batch import microbatches

COUNT = 3
IDS = Input("ids", (2, 4), torch.int64)
SCALE = Input("scale", (), torch.float32)


def program(*inputs: Input, positional: bool = False) -> RankProgram:
    return RankProgram(
        rank=0,
        size=1,
        device="cpu",
        microbatches=COUNT,
        digest="0",
        loss=torch.float32,
        inputs={item.key.replace(".", "_"): item for item in inputs},
        values={},
        tied={},
        channels=(),
        stages=(0,),
        instructions=(),
        evaluation=(),
        positional=positional,
    )


def refused(batch: object, message: str, *inputs: Input, positional: bool = False) -> None:
    with pytest.raises(pc.InputError, match=re.escape(message)):
        microbatches(program(*inputs, positional=positional), batch)


def ids(rows: int = 2 * COUNT) -> torch.Tensor:
    return torch.arange(rows * 4).reshape(rows, 4)


def test_rows_are_dealt_to_microbatches_in_order() -> None:
    batch = {"ids": ids(), "scale": torch.tensor(2.0)}
    pieces = microbatches(program(IDS, SCALE), batch)
    assert len(pieces) == COUNT
    assert torch.equal(torch.cat([piece["ids"] for piece in pieces]), batch["ids"])
    assert all(piece["ids"].shape == (2, 4) for piece in pieces)
    assert all(piece["scale"] is batch["scale"] for piece in pieces)


def test_a_missing_tensor_is_named() -> None:
    refused({"ids": [[1, 2]]}, "batch['ids'] must be a tensor, as in the inputs (several", IDS)
    message = "the batch lacks 'scale' (it has: ids; needed: ids, scale)"
    refused({"ids": ids()}, message, IDS, SCALE)
    refused({}, "the batch lacks 'ids' (it has: nothing; needed: ids)", IDS)


def test_a_tensor_that_the_model_was_compiled_without_is_named() -> None:
    batch = {"ids": ids(), "mask": ids()}
    refused(batch, "the batch has 'mask', which the model was compiled without (needed: ids)", IDS)


def test_constants_may_stand_in_the_batch_or_not() -> None:
    constants = {"use_cache": False, "mask": None, "fill": math.nan}
    spec = replace(program(IDS), constants=constants)
    for batch in ({"ids": ids()}, {"ids": ids()} | constants | {"fill": float("nan")}):
        assert list(microbatches(spec, batch)[0]) == ["ids"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"weight": 2.0}, "batch['weight'] is 2.0, and the model was compiled with 1.0"),
        ({"mask": ids()}, "batch['mask'] is Tensor, and the model was compiled with None"),
        ({"mask": [1]}, "the batch has 'mask.0', which the model was compiled without"),
        ({"typo": 3}, "the batch has 'typo', which the model was compiled without (needed: ids)"),
    ],
)
def test_other_constants_than_those_of_the_model_are_refused(
    given: dict[str, Any], message: str
) -> None:
    spec = replace(program(IDS), constants={"weight": 1.0, "mask": None})
    with pytest.raises(pc.InputError, match=re.escape(message)):
        microbatches(spec, {"ids": ids(), **given})


def test_a_program_keeps_the_constants_of_its_inputs(tmp_path: Path) -> None:
    class Weighted(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(2, 2)

        def forward(self, x: torch.Tensor, weight: float, names: list[str]) -> torch.Tensor:
            loss: torch.Tensor = weight * len(names) * self.inner(x).sum()
            return loss

    inputs = {"x": torch.ones(1, 2), "weight": 0.5, "names": ["a", 'b"']}
    compiled = pc.compile(Weighted(), pc.Mesh(), inputs, microbatches=1, progress=False)
    known = {"weight": 0.5, "names.0": "a", "names.1": 'b"'}
    assert compiled.rank_program(0).constants == known
    compiled.export(tmp_path)
    with pc.load(tmp_path).worker() as worker:
        assert worker.program.constants == known


def test_one_tensor_is_a_batch_by_itself(tmp_path: Path) -> None:
    class Single(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(2, 2)

        def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            loss: torch.Tensor = scale * self.inner(x).sum()
            return loss

    model, x = Single(), torch.ones(4, 2)
    compiled = pc.compile(model, pc.Mesh(), x[:2], microbatches=2, progress=False)
    compiled.export(tmp_path)
    with pc.load(tmp_path).worker() as worker:
        assert worker.program.constants == {}
        assert worker.step(x).item() == pytest.approx(model(x[:2]).item())


def test_another_dtype_is_refused() -> None:
    message = "batch['ids'] must have dtype torch.int64 (torch.int32 given)"
    refused({"ids": ids().int()}, message, IDS)


@pytest.mark.parametrize("value", [[[1, 2], [3, 4]], 3, None, "text"])
def test_what_is_no_tensor_is_refused(value: object) -> None:
    with pytest.raises(pc.InputError, match=r"must be a tensor|lacks 'ids'"):
        microbatches(program(IDS), {"ids": value})


def test_another_shape_is_refused_with_the_one_that_is_needed() -> None:
    message = "batch['ids'] must have shape (6, 4): 3 micro-batches of (2, 4) ((6, 5) given)"
    refused({"ids": torch.zeros(6, 5, dtype=torch.int64)}, message, IDS)
    refused({"ids": ids(12)}, "((12, 4) given)", IDS)
    refused({"ids": torch.tensor(3)}, "(() given)", IDS)
    refused({"scale": torch.ones(3)}, "must have shape ()", SCALE)


def test_rows_that_cannot_be_divided_are_counted() -> None:
    refused({"ids": ids(7)}, "; 7 rows cannot be divided into 3 micro-batches", IDS)


def test_one_microbatch_in_the_place_of_a_batch_is_refused() -> None:
    refused({"ids": ids(2)}, "must have shape (6, 4)", IDS)


def test_a_tuple_is_refused_where_keywords_were_compiled() -> None:
    refused((ids(),), "must be a dict of keyword arguments, as the inputs were (tuple given)", IDS)


def test_a_dict_is_refused_where_positions_were_compiled() -> None:
    first = Input("0", (2, 4), torch.int64)
    message = "must be a tuple of positional arguments, as the inputs were (dict given)"
    refused({"ids": ids()}, message, first, positional=True)


def test_positions_count_from_zero_and_constants_keep_theirs() -> None:
    spec = program(Input("1", (2, 4), torch.int64), positional=True)
    spec = replace(spec, constants={"0": True})
    assert torch.equal(microbatches(spec, (True, ids()))[0]["1"], ids()[:2])
    assert torch.equal(microbatches(spec, [1, ids()])[0]["1"], ids()[:2])


def test_the_form_of_a_batch_has_the_constants_and_what_is_nested() -> None:
    inputs = [Input(key, (2, 4), torch.int64) for key in ("1", "3.0", "3.1.k")]
    constants = {"0": 0.5, "2": True, "3.1.scale": 2.0, "4": None}
    spec = replace(program(*inputs, positional=True), constants=constants)
    form = spec.in_form({item.key: ids() for item in inputs})
    assert isinstance(form, tuple)
    assert len(form) == 5
    assert len(microbatches(spec, form)[0]) == 3
    fewer = spec.in_form({"3.0": ids()})  # predictions need no labels, say
    assert isinstance(fewer, tuple)
    assert fewer[1] == ()


def test_a_single_tensor_is_the_first_argument() -> None:
    spec = program(Input("0", (2, 4), torch.int64), positional=True)
    assert torch.equal(microbatches(spec, ids())[2]["0"], ids()[4:])


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


@pytest.mark.parametrize(
    ("batch", "keys"),
    [
        ({"images": (ids(), ids())}, ("images.0", "images.1")),
        ({"images": [ids(), None, ids()]}, ("images.0", "images.2")),
        ({"both": {"left": ids(), "right": ids()}}, ("both.left", "both.right")),
        ({"pair": Pair(ids(), ids())}, ("pair.left", "pair.right")),
        (UserDict({"a": ids(), "b": ids()}), ("a", "b")),
    ],
)
def test_tensors_in_nested_values_are_known_by_their_path(
    batch: Any, keys: tuple[str, ...]
) -> None:
    spec = program(*(Input(key, (2, 4), torch.int64) for key in keys))
    spec = replace(spec, constants={"images.1": None} if "images.2" in keys else {})
    names = {key.replace(".", "_") for key in keys}
    assert all(set(piece) == names for piece in microbatches(spec, batch))


def test_paths_are_those_of_capture() -> None:
    from parcompiler.capture.inputs import flat
    from parcompiler.runtime.batch import _leaves

    inputs = {"a": ids(), "b": (ids(), {"c": [ids()]}), "p": Pair(ids(), ids()), "flag": True}
    assert [key for key, _ in _leaves(inputs)] == [key for key, _ in flat(inputs)]
    assert [key for key, _ in _leaves((ids(), None, 2))] == ["0", "1", "2"]


@dataclass
class Views:
    first: torch.Tensor
    second: list[torch.Tensor]
    scale: float


torch.export.register_dataclass(Views)


def test_a_registered_dataclass_is_an_input_with_names_for_its_fields() -> None:
    class Viewed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(2, 2)

        def forward(self, views: Views) -> torch.Tensor:
            x = views.first + views.second[0]
            loss: torch.Tensor = views.scale * self.inner(x).square().mean()
            return loss

    def given(rows: int) -> dict[str, Views]:
        return {"views": Views(torch.ones(rows, 2), [torch.ones(rows, 2)], 0.5)}

    model = Viewed()
    compiled = pc.compile(model, pc.Mesh(), given(2), microbatches=2, progress=False)
    with compiled.worker() as worker:
        assert worker.program.constants == {"views.scale": 0.5}
        assert worker.step(given(4)).item() == pytest.approx(model(**given(2)).item())


def test_a_named_tuple_has_arguments_by_position() -> None:
    class Distance(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(2, 2)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = (self.inner(x) - y).square().mean()
            return loss

    model, pair = Distance(), Pair(torch.ones(4, 2), torch.zeros(4, 2))
    micro = Pair(pair.left[:2], pair.right[:2])
    compiled = pc.compile(model, pc.Mesh(), micro, microbatches=2, progress=False)
    with compiled.worker() as worker:
        assert worker.step(pair).item() == pytest.approx(model(*micro).item())


def test_a_tensor_that_wants_a_gradient_is_evaluated_and_not_trained_on() -> None:
    x = Input("x", (2, 4), torch.float32)
    features = torch.nn.Linear(4, 4)(torch.ones(2 * COUNT, 4))
    refused({"x": features}, "batch['x'] requires a gradient, and a step gives none to its i", x)
    assert len(microbatches(program(x), {"x": features}, fewer=True)) == COUNT
    assert len(microbatches(program(x), {"x": features.detach()})) == COUNT


@pytest.mark.parametrize(
    ("change", "given"),
    [
        (torch.Tensor.to_sparse, "torch.sparse_coo"),
        (lambda x: torch.nested.as_nested_tensor(list(x), layout=torch.jagged), "nested"),
        (lambda x: x.to("meta"), "meta"),
    ],
)
def test_a_tensor_without_values_in_rows_is_refused(
    change: Callable[[torch.Tensor], torch.Tensor], given: str
) -> None:
    message = f"batch['ids'] must be a dense tensor with values ({given} given)"
    refused({"ids": change(ids())}, message, IDS)


def test_a_tensor_of_inference_mode_is_trained_on() -> None:
    model = torch.nn.Linear(2, 2)
    compiled = pc.compile(
        model, pc.Mesh(), torch.ones(2, 2), loss=torch.sum, microbatches=2, progress=False
    )
    with torch.inference_mode():
        x = torch.ones(4, 2) + 1
    with compiled.worker() as worker:
        assert worker.step(x).item() == pytest.approx(model(x.clone()).sum().item() / 2)


def test_equal_batches_have_one_digest_and_others_another() -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    same = [[{"x": whole}], [{"x": whole.t().contiguous().t()}], [{"x": whole.clone()}]]
    others = [
        [],
        [{"y": whole}],
        [{"x": whole[:2]}, {"x": whole[2:]}],
        [{"x": whole.flip(0)}],
        [{"x": whole.reshape(4, 3)}],
        [{"x": whole.double()}],
        [{"x": torch.where(whole == 7, torch.tensor(7.0).nextafter(torch.tensor(8.0)), whole)}],
        [{"x": whole[:0]}],
    ]
    assert len({digest_of_batch(pieces) for pieces in same}) == 1
    assert len({digest_of_batch(pieces) for pieces in (same[0], *others)}) == 1 + len(others)
    assert all(0 < digest_of_batch(pieces) < 2**62 for pieces in (*same, *others))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, ""),
        ({0: 5, 1: 5, 4: 5, 5: 5}, ""),  # data coordinate 0
        ({1: 5}, r"ranks 0 and 1 were given different batches.* coordinate \(0\)"),
        ({6: 5}, r"ranks 2 and 6 were given different batches.* coordinate \(1\)"),
    ],
)
def test_tensor_and_pipeline_ranks_have_the_batch_of_their_data_coordinate(
    changes: dict[int, int], text: str
) -> None:
    of_all = replace(program(IDS), size=8, data=2, tensor=2)
    calls = [
        WorkerCall(1, 100, 3, changes.get(rank, of_all.grid.coordinate(rank).data))
        for rank in range(8)
    ]
    assert (
        re.search(text, difference_of_calls(of_all, calls))
        if text
        else not difference_of_calls(of_all, calls)
    )


def test_calls_that_differ_are_told_apart_from_batches() -> None:
    of_all = replace(program(IDS), size=2)
    for other, text in {
        WorkerCall(0, 100, 3, 1): "rank 1: evaluation of 3 micro-batches, check_batches = 100",
        WorkerCall(1, 10, 3, 1): "rank 1: training of 3 micro-batches, check_batches = 10",
        WorkerCall(1, 100, 2, 1): "rank 1: training of 2 micro-batches, check_batches = 100",
        WorkerCall(1, 100, 0, 0): "rank 1 refused its batch (its own error says why)",
    }.items():
        assert text in difference_of_calls(of_all, [WorkerCall(1, 100, 3, 1), other])
