"""Ranks that would train something else than the others are told so, before anything is sent."""

import json

import pytest
import torch

import parcompiler as pc
from tests import zoo
from tests.distributed import forked, starting

RANKS = 4
Said = dict[str, list[list[str]]]

FILES = "LaunchError: the ranks run different scripts or weights (rank 1 has others than rank 0"
DAMAGED = "weights/stage_0.safetensors is not as it was exported: copy or export the folder again"
BATCHES = "InputError: ranks 0 and 2 were given different batches"
REFUSED = (
    "InputError: rank 1 refused its batch (its own error says why), so no rank has used this one"
)
LACKS = "InputError: the batch lacks 'labels'"
CALLS = "InputError: all ranks must make the same call (rank 0: evaluation of 1 micro-batches,"
WEIGHTS = (
    "InputError: ranks {} must hold the same weights, and do not ({} tensors differ, the first is "
    "{!r}): seed every rank alike before building the model, or load the same weights on all of"
)
NAN = "is not finite (nan): the parameters are as before the step"


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Said:
    """What each rank was told, for each way."""
    folder = tmp_path_factory.mktemp("starting")
    for name in ("out", "other"):
        program(other=name == "other").export(folder / name)
    program("gpt-tied").export(folder / "tied")
    program(mesh=pc.Mesh(tensor=2, data=2)).export(folder / "tensor")
    text = forked.run(RANKS, starting.main, str(folder))
    found: Said = {way: [[]] * RANKS for way in starting.WAYS}
    for line in text.splitlines():
        if line.startswith("{"):
            answer = json.loads(line)
            found[answer["way"]][answer["rank"]] = answer["said"]
    return found


def program(name: str = "gpt", other: bool = False, mesh: pc.Mesh | None = None) -> pc.Program:
    """Two pipeline and two data ranks, or others; with `other` weights on request."""
    model, inputs = zoo.build(name)
    if other:
        with torch.no_grad():
            next(model.parameters()).add_(1)
    mesh = mesh or pc.Mesh(pipeline=2, data=2)
    sharding = {"*up.weight": "S(0)"} if mesh.tensor > 1 else "auto"
    return pc.compile(
        model, mesh, inputs, microbatches=starting.MICROBATCHES, schedule="1f1b", sharding=sharding
    )


def loss(microbatches: int = starting.MICROBATCHES, name: str = "gpt") -> float:
    """The mean loss of the model over the first micro-batches of both data coordinates."""
    model, _ = zoo.build(name)
    with torch.no_grad():
        losses = [
            model(**{key: tensor[i : i + 2] for key, tensor in starting.batch(data).items()})
            for data in range(2)
            for i in range(0, 2 * microbatches, 2)
        ]
    return float(torch.stack(losses).mean())


def test_a_script_that_is_edited_on_one_rank_is_refused_on_all(said: Said) -> None:
    texts = [text for (text,) in said["a_script_edited_on_one_rank"]]
    assert all(text.startswith(FILES) for text in texts), texts
    assert ["edited on this rank: stage_0.py" in text for text in texts] == [
        False, True, False, False,
    ]  # fmt: skip


def test_another_learning_rate_on_one_data_rank_is_refused_on_all(said: Said) -> None:
    for refused, loss_again in said["another_learning_rate"]:
        assert refused.startswith(
            "InputError: ranks 0 and 1 would update the same parameters differently ('lr' of group "
            "0 of the optimizer is 0.1 on rank 0, 0.05 on rank 1): change it by what all ranks have"
        )
        assert float(loss_again) > 0


def test_a_script_that_is_edited_on_all_ranks_runs(said: Said) -> None:
    for (text,) in said["a_script_edited_on_all_ranks"]:
        assert float(text) == pytest.approx(loss(), rel=1e-6)


def test_an_export_of_other_weights_is_refused_on_all_ranks(said: Said) -> None:
    for (text,) in said["an_export_of_other_weights"]:
        assert text.startswith(FILES)


def test_a_damaged_weight_is_named_on_all_ranks(said: Said) -> None:
    texts = [text for (text,) in said["a_damaged_weight"]]
    assert all(DAMAGED in text for text in texts), texts
    assert texts[1].startswith("InputError: ")
    assert all("because rank 1 failed" in text for text in (texts[0], *texts[2:])), texts


def test_another_batch_on_one_rank_is_refused_where_batches_are_compared(said: Said) -> None:
    for first, good, later in said["another_batch"]:
        assert first.startswith(BATCHES)
        assert float(good) == pytest.approx(loss(), rel=1e-6)
        assert later.startswith(BATCHES)


def test_ranks_go_on_after_one_has_refused_its_batch_and_end_with_it(said: Said) -> None:
    for rank, (first, good, again, last) in enumerate(said["a_batch_refused_by_one_rank"]):
        assert float(good) == float(again) == pytest.approx(loss(), rel=1e-6)
        assert first.startswith(LACKS if rank == 1 else REFUSED)
        if rank == 1:
            assert last.startswith(LACKS)
        else:
            assert f"because rank 1 refused its batch: {LACKS}" in last


def test_evaluations_of_fewer_micro_batches_are_of_as_many_on_all_ranks(said: Said) -> None:
    for refused, evaluated in said["evaluations_of_fewer"]:
        assert refused.startswith(CALLS)
        assert float(evaluated) == pytest.approx(loss(1), rel=1e-6)


def test_a_loss_that_is_not_finite_ends_all_ranks_on_request(said: Said) -> None:
    for good, *bad in said["a_loss_that_is_not_finite"]:
        assert float(good) == pytest.approx(loss(), rel=1e-6)
        assert [f"LaunchError: the loss of step {n} {NAN}" for n in (2, 3)] == bad


@pytest.mark.parametrize(
    ("axis", "ranks", "tensors", "name"),
    [
        ("data", "2 and 3", 1, "head.weight"),
        ("tensor", "0 and 1", 1, "layers.1.ffn_norm.weight"),  # of `up` they have pieces
        ("pipeline", "0 and 2", 1, "embedding.weight"),
    ],
)
def test_weights_that_differ_where_they_must_not_are_refused_after_every_loading(
    said: Said, axis: str, ranks: str, tensors: int, name: str
) -> None:
    refused = WEIGHTS.format(ranks, tensors, name)
    expected = loss(name="gpt-tied" if axis == "pipeline" else "gpt")
    for *bad, good, trained, again in said[f"another_weight_on_one_{axis}_rank"]:
        assert all(text.startswith(refused) for text in (*bad, again)), bad
        assert float(good) == pytest.approx(expected, rel=1e-6)
        assert float(trained) != float(good)


def test_ranks_that_build_models_from_different_seeds_are_refused(said: Said) -> None:
    for refused, loaded in said["another_seed_on_one_rank"]:
        assert refused.startswith(WEIGHTS.format("0 and 1", 2, "0.bias"))
        assert float(loaded) == 2.0
