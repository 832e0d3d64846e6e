"""Which device a rank computes on, and what is said when there is none."""

import pytest
import torch

import parcompiler as pc
from parcompiler.runtime import rank_device


@pytest.fixture(autouse=True)
def no_wishes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PARCOMPILER_DEVICE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def with_devices(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def test_a_plan_for_the_cpu_runs_on_the_cpu() -> None:
    assert rank_device("cpu") == torch.device("cpu")


def test_a_rank_has_the_device_of_its_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    with_devices(monkeypatch, 4)
    assert rank_device("h100") == torch.device("cuda", 0)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert rank_device("h100") == torch.device("cuda", 3)


@pytest.mark.parametrize(("count", "local"), [(0, 0), (2, 2)])
def test_a_missing_device_is_named_with_the_way_round(
    monkeypatch: pytest.MonkeyPatch, count: int, local: int
) -> None:
    with_devices(monkeypatch, count)
    monkeypatch.setenv("LOCAL_RANK", str(local))
    message = rf"for device 'h100' and needs CUDA device {local} \({count} found\); PARC.*=cpu runs"
    with pytest.raises(pc.LaunchError, match=message):
        rank_device("h100")


def test_the_environment_overrides_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    with_devices(monkeypatch, 1)
    monkeypatch.setenv("PARCOMPILER_DEVICE", "cpu")
    assert rank_device("h100") == torch.device("cpu")
    monkeypatch.setenv("PARCOMPILER_DEVICE", "cuda")
    assert rank_device("cpu") == torch.device("cuda", 0)
    monkeypatch.setenv("PARCOMPILER_DEVICE", "")
    assert rank_device("cpu") == torch.device("cpu")


def test_an_unknown_override_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARCOMPILER_DEVICE", "cuda:1")
    with pytest.raises(pc.LaunchError, match=r"must be 'cpu' or 'cuda' \('cuda:1' given\)"):
        rank_device("cpu")
