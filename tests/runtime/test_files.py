"""The reader of safetensors files: everything that the writer writes, and nothing that is none."""

import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import parcompiler as pc
from parcompiler.runtime.tensor_files import read, write

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint64,
    torch.uint32,
    torch.uint16,
    torch.uint8,
    torch.bool,
]


def written(path: Path) -> Path:
    save_file({"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(5)}, path)
    return path


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_dtype_read_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    values = torch.tensor([[0, 1, 2], [3, 100, 1]]).to(dtype)
    tensors = {"matrix": values, "scalar": values[1, 1].clone(), "empty": values[:0].clone()}
    save_file(tensors, tmp_path / "w.safetensors", metadata={"format": "pt"})
    found = dict(read(tmp_path / "w.safetensors"))
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == dtype
        assert found[name].shape == tensor.shape
        assert bytes_of(found[name]) == bytes_of(tensor)


def test_complex128_is_stored_as_pairs_that_the_metadata_names(tmp_path: Path) -> None:
    z = torch.randn(2, 3, dtype=torch.complex128)
    tensors = {"z": z.mT.conj(), "scalar": z[0, 0], "empty": z[:0], "pair": torch.view_as_real(z)}
    write(tmp_path / "w.safetensors", tensors)
    found = dict(read(tmp_path / "w.safetensors"))
    assert {name: tensor.dtype for name, tensor in found.items()} == {
        name: tensor.dtype for name, tensor in tensors.items()
    }
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert load_file(tmp_path / "w.safetensors")["z"].shape == (3, 2, 2)
    write(tmp_path / "plain.safetensors", {"x": torch.ones(2)})
    with safe_open(tmp_path / "plain.safetensors", "pt") as file:
        assert file.metadata() is None


def test_complex128_is_read_wherever_it_stands(tmp_path: Path) -> None:
    z = torch.randn(5, dtype=torch.complex128)
    for before in range(4):
        path = tmp_path / f"{before}.safetensors"
        others = {f"a{k}": torch.ones(1, dtype=torch.float64) for k in range(before)}
        write(path, {**others, "z": z})
        assert torch.equal(dict(read(path))["z"], z)  # where it is not aligned, torch crashed


@pytest.mark.parametrize("metadata", ["[[]]", "3", "[", '["a"]'])
def test_metadata_that_lies_of_pairs_is_refused(tmp_path: Path, metadata: str) -> None:
    path = tmp_path / "w.safetensors"
    save_file({"a": torch.ones(3)}, path, {"complex128": metadata})
    with pytest.raises(pc.InputError, match=r"no safetensors file|damaged or unknown entry"):
        dict(read(path))


def bytes_of(tensor: torch.Tensor) -> list[int]:
    return tensor.reshape(-1).view(torch.uint8).tolist() if tensor.numel() else []


def test_what_is_read_is_a_copy(tmp_path: Path) -> None:
    path = written(tmp_path / "w.safetensors")
    for _, tensor in read(path):
        tensor.fill_(9.0)
    assert torch.equal(dict(read(path))["b"], torch.ones(5))


def test_a_file_without_tensors_yields_none(tmp_path: Path) -> None:
    save_file({}, tmp_path / "w.safetensors")
    assert list(read(tmp_path / "w.safetensors")) == []


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(pc.InputError, match=r"cannot read .*w\.safetensors \(No such file"):
        list(read(tmp_path / "w.safetensors"))


@pytest.mark.parametrize("kept", [0, 3, 8, 20, -1, -20])
def test_a_file_that_is_cut_short_is_refused(tmp_path: Path, kept: int) -> None:
    path = written(tmp_path / "w.safetensors")
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(pc.InputError, match="cut short"):
        list(read(path))


def test_a_pickled_file_is_refused_and_not_run(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
    with pytest.raises(pc.InputError, match="no safetensors file"):
        list(read(path))
    torch.save({"a": torch.ones(2)}, path)
    with pytest.raises(pc.InputError, match="no safetensors file"):
        list(read(path))
    assert not (tmp_path / "sprung").exists()


class Trap:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize(
    "header",
    [
        {"a": {"dtype": "F99", "shape": [2], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [2]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 7]}},
        {"a": 3},
    ],
)
def test_a_damaged_entry_is_named(tmp_path: Path, header: object) -> None:
    raw = json.dumps(header).encode()
    path = tmp_path / "w.safetensors"
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(8))
    with pytest.raises(pc.InputError, match="damaged or unknown entry for 'a'"):
        list(read(path))


def test_a_header_that_is_no_object_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes((2).to_bytes(8, "little") + b"[]")
    with pytest.raises(pc.InputError, match="no safetensors file"):
        list(read(path))
