"""Code in the documentation runs and prints what the pages say; its commands are commands."""

import contextlib
import io
import shlex
import textwrap
from pathlib import Path
from typing import Any

import click
import pytest

from parcompiler.cli.app import parcompiler
from tests.docs.pages import DOCS, PAGES, ROOT, commands, examples

SLOW = {  # they run in the sweep
    "how-to/huggingface.md": "imports transformers",
    "how-to/weights.md": "imports transformers",
    "how-to/mesh.md": "weighs all meshes of a cluster",
    "how-to/peft.md": "imports transformers",
    "how-to/trainer.md": "imports transformers",
    "how-to/accelerate.md": "imports accelerate",
    "how-to/lightning.md": "imports lightning",
}
NEEDS = {
    "how-to/peft.md": "peft",
    "how-to/trainer.md": "accelerate",
    "how-to/accelerate.md": "accelerate",
    "how-to/lightning.md": "lightning",
}  # packages that no extra of ours installs
WITH_CODE = [page for page in PAGES if any(examples((DOCS / page).read_text()))]


def run(text: str, page: str) -> None:
    """Run the examples of a page, one after the other, as one script."""
    names: dict[str, Any] = {"__name__": "page"}
    for example in examples(text):
        code = compile("\n" * (example.line - 1) + example.code, page, "exec")
        found = io.StringIO()
        with contextlib.redirect_stdout(found):
            exec(code, names)
        if example.printed is not None:
            assert found.getvalue().rstrip() == example.printed.rstrip(), f"{page}:{example.line}"


@pytest.mark.parametrize(
    "page", [pytest.param(p, marks=[pytest.mark.sweep] if p in SLOW else []) for p in WITH_CODE]
)
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning:lightning")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # by peft
def test_the_code_of_a_page_runs_and_prints_what_it_says(page: str) -> None:
    if page in NEEDS:
        pytest.importorskip(NEEDS[page])
    run((DOCS / page).read_text(), page)


@pytest.mark.sweep
def test_the_readme_compiles_and_proves_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    """Its first two blocks; the rest is for clusters."""
    first, second = list(examples((ROOT / "README.md").read_text()))[:2]
    assert "pc.compile" in first.code
    exec(compile(first.code + second.code, "README.md", "exec"), {"__name__": "page"})
    out = capsys.readouterr().out
    assert out.startswith("GPT2LMHeadModel on 4 x a100-80g")
    assert "verified: ok" in out


def test_code_that_fails_or_prints_something_else_is_found() -> None:
    with pytest.raises(ZeroDivisionError):
        run("```python\n1 / 0\n```\n", "a.md")
    with pytest.raises(AssertionError, match=r"a\.md:4"):
        run("# Title\n\n```python\nprint(1)\n```\n\n```text\n2\n```\n", "a.md")
    run("```py\n1 / 0\n```\n\n```python\nprint(1)\n```\n\n```text\n1\n```\n", "a.md")


def typed(text: str) -> list[list[str]]:
    """The calls of parcompiler in shell blocks: those behind the name of the command."""
    lines = [line.strip() for line in commands(text) if "parcompiler " in f"{line} "]
    words = [shlex.split(line, comments=True) for line in lines]
    found = []
    for line in words:
        for number, word in enumerate(line):
            if word in ("parcompiler", ".venv/bin/parcompiler"):
                found.append(line[number + 1 :])
                break
    return found


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{page}" for page in PAGES)])
def test_the_commands_of_a_page_are_commands(page: str) -> None:
    for arguments in typed((ROOT / page).read_text()):
        check(arguments)


def test_the_commands_of_help_texts_are_commands() -> None:
    for command in parcompiler.commands.values():
        text = textwrap.dedent(command.help or "").replace("\\\n", " ")
        for line in text.splitlines():
            if line.strip().startswith("parcompiler "):
                check(shlex.split(line.partition("|")[0])[1:])


def test_a_command_that_is_none_is_found() -> None:
    with pytest.raises(click.UsageError, match="No such option"):
        check(["plan", "m.py:make", "--mash", "pipeline=2"])
    assert typed("```sh\ntorchrun -m parcompiler report out  # again\n```\n") == [["report", "out"]]


def check(arguments: list[str]) -> None:
    """Parse a command line without doing what it says. Raises click.UsageError."""
    root = click.Context(parcompiler, info_name="parcompiler", obj=_Settings())
    name, command, rest = parcompiler.resolve_command(root, list(arguments))
    assert command is not None
    command.make_context(name, rest, parent=root)


def _Settings() -> Any:
    from parcompiler.cli.output import Settings

    return Settings()


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    for page in PAGES:  # that of the package index is for it alone
        assert f"- {page}\n" in text or page == "package.md", page
    assert Path(DOCS / "index.md").is_file()
