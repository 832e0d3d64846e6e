"""How a process becomes a rank: what torchrun, a PyTorchJob and srun say in its environment."""

import os

import pytest

from parcompiler.errors import LaunchError
from parcompiler.runtime.joining import place

WORDS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "first",
            "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "run"}  # fmt: skip
PYTORCHJOB = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "train-master-0",
              "MASTER_PORT": "23456", "PYTHONUNBUFFERED": "1", "PET_NNODES": "2"}  # fmt: skip
SRUN = {"SLURM_JOB_ID": "1007", "SLURM_STEP_ID": "2", "SLURM_PROCID": "5", "SLURM_LOCALID": "1",
        "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "8", "SLURM_NODEID": "2",
        "SLURM_STEP_TASKS_PER_NODE": "3(x2),2",
        "SLURM_STEP_NODELIST": "gpu[003-004,010]"}  # fmt: skip
BATCH = {"SLURM_JOB_ID": "1007", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"}  # its script, no step


def started(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> dict[str, str]:
    """What `place` leaves of torchrun's words in such an environment."""
    for name in [*os.environ]:
        if name in WORDS or name.startswith(("SLURM_", "TORCHELASTIC_", "PET_")):
            monkeypatch.delenv(name)
    for name in WORDS:  # so that what `place` adds is taken away again
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    place()
    return {name: os.environ[name] for name in WORDS if name in os.environ}


def test_torchrun_a_pytorchjob_and_srun_say_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    assert started(monkeypatch, TORCHRUN)["RANK"] == "3" and place() == (3, 8)
    assert started(monkeypatch, PYTORCHJOB)["MASTER_ADDR"] == "train-master-0"
    assert place() == (1, 2)
    words = ("5", "8", "1", "2", "gpu003", str(15_000 + 1009))
    assert started(monkeypatch, SRUN) == dict(zip(WORDS, words, strict=True))
    assert place() == (5, 8)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("alone", "alone"), ("a1,a2", "a1"), ("gpu[7,9]-ib", "gpu7-ib"), ("n[01-04],m[1-2]", "n01")],
)
def test_ranks_of_srun_meet_at_the_first_node(
    monkeypatch: pytest.MonkeyPatch, nodes: str, first: str
) -> None:
    found = started(monkeypatch, {**SRUN, "SLURM_STEP_NODELIST": nodes})
    assert found["MASTER_ADDR"] == first


def test_a_task_with_a_device_of_its_own_counts_it_from_0(monkeypatch: pytest.MonkeyPatch) -> None:
    assert started(monkeypatch, {**SRUN, "SLURM_GPUS_PER_TASK": "1"})["LOCAL_RANK"] == "0"


@pytest.mark.parametrize("variables", [{}, BATCH, {**SRUN, "SLURM_STEP_NUM_TASKS": "1"}])
def test_a_process_that_is_alone_is_no_rank(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    assert started(monkeypatch, variables) == {} and place() is None


def test_a_rank_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LaunchError, match="RANK and WORLD_SIZE must be numbers"):
        started(monkeypatch, {**TORCHRUN, "RANK": "first"})
