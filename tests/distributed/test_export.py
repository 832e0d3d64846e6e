"""An exported folder trains anywhere, without the model's source, as the program itself does."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import parcompiler as pc
from tests import zoo
from tests.distributed import forked, own_worker
from tests.distributed.torchrun import torchrun

BLOCKED = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"ortools", "safetensors", "rich", "jinja2", "transformers"}:
            raise ImportError(name)
# An editable installation would answer for modules of parcompiler that were not copied.
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in str(finder)]
sys.meta_path.insert(0, Blocked())
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A standalone export of GPT-2, copied to another place, with three batches of data."""
    made = tmp_path_factory.mktemp("made") / "out"
    own_worker.compiled().export(made, standalone=True)
    copied = tmp_path_factory.mktemp("copied") / "elsewhere"
    shutil.copytree(made, copied)
    shutil.rmtree(made)
    rows = 3 * zoo.ROWS * own_worker.MICROBATCHES
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, zoo.VOCABULARY, (rows, zoo.LENGTH), generator=generator)
    save_file({"input_ids": ids, "labels": ids.clone()}, copied / "data.safetensors")
    return copied


def losses(text: str) -> list[str]:
    return re.findall(r"step \d+ loss [\d.]+", text)


def test_a_copied_folder_gives_the_losses_of_the_program_with_torch_alone(folder: Path) -> None:
    data = folder / "data.safetensors"
    program = losses(forked.run(2, own_worker.main, str(data)))
    (folder / "sitecustomize.py").write_text(BLOCKED)
    main = folder / "main.py"
    main.write_text(BLOCKED + main.read_text())
    exported = losses(torchrun(2, main, "--steps", "3", "--data", str(data)))
    assert len(exported) == 3
    assert exported == program
    assert (folder / "parcompiler" / "runtime" / "worker.py").is_file()
    assert not (folder / "parcompiler" / "compiler.py").exists()


def test_the_script_in_the_readme_of_a_standalone_folder_runs_with_torch_alone(
    folder: Path,
) -> None:
    readme = (folder / "README.md").read_text().partition("From your own script")[2]
    script = [line[4:] for line in readme.splitlines() if line.startswith("    ")][:5]
    rows = zoo.ROWS * own_worker.MICROBATCHES
    batch = [
        f"ids = torch.zeros({rows}, {zoo.LENGTH}, dtype=torch.long)",
        "batch = {'input_ids': ids, 'labels': ids}",
    ]
    own = folder / "own.py"
    own.write_text("\n".join([BLOCKED, *script[:-1], *batch, script[-1], "print(loss)"]))
    assert torchrun(2, own).count("tensor(") == 2  # lines of two ranks may be mixed


def test_a_wrong_number_of_processes_is_refused(folder: Path) -> None:
    text = forked.run(1, forked.script, str(folder / "main.py"), ok=False)
    assert "the plan needs 2 processes (1 started)" in text


def test_a_loaded_folder_is_the_program(folder: Path) -> None:
    program = own_worker.compiled()
    loaded = pc.load(folder)
    assert loaded.plan == program.plan
    assert str(loaded.report()) == str(program.report())
    for rank in range(2):
        assert str(loaded.instructions(rank)) == str(program.instructions(rank))
    with pytest.raises(pc.InputError, match="no rank 2"):
        loaded.instructions(2)


def test_a_folder_that_is_no_export_is_refused(tmp_path: Path) -> None:
    with pytest.raises(pc.InputError, match=r"no exported program: it has no plan\.json"):
        pc.load(tmp_path)
    (tmp_path / "precious.txt").write_text("mine")
    with pytest.raises(pc.InputError, match="is no export of parcompiler"):
        own_worker.compiled().export(tmp_path)
    assert (tmp_path / "precious.txt").read_text() == "mine"
    with pytest.raises(pc.InputError, match=r"cannot export to .*precious\.txt/out"):
        own_worker.compiled().export(tmp_path / "precious.txt" / "out")
