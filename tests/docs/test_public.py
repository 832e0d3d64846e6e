"""What is public is described: what it is, its units, and what it raises."""

import ast
import dataclasses
import inspect
import re
import textwrap
import tomllib
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import pytest

import parcompiler as pc
from parcompiler.instruction import Kind
from parcompiler.plan import Plan
from tests.docs.pages import DOCS


def members(name: str) -> Iterator[tuple[str, Any]]:
    """A public object, and the functions that a class of ours has."""
    found = getattr(pc, name)
    yield name, found
    if inspect.isclass(found):
        for key, member in vars(found).items():
            if key.startswith("_"):
                continue
            function = _function(member)
            if function is not None and function.__module__.startswith("parcompiler"):
                yield f"{name}.{key}", function


def _function(member: Any) -> Any:
    """The function behind a member of a class; None for a value."""
    for name in ("fget", "func", "__func__"):
        member = getattr(member, name, None) or member
    return member if isinstance(member, FunctionType) else None


PUBLIC = {place: found for name in pc.__all__ for place, found in members(name)}


def raised(function: Any) -> set[str]:
    """Errors of ours that a function raises in its own lines."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    names = {
        node.exc.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise)
        and isinstance(node.exc, ast.Call)
        and isinstance(node.exc.func, ast.Name)
    }
    return {name for name in names if hasattr(pc, name)}


@pytest.mark.parametrize("place", PUBLIC)
def test_a_public_name_says_what_it_is_and_what_it_raises(place: str) -> None:
    found = PUBLIC[place]
    text = inspect.getdoc(found)
    assert text, f"{place} has no docstring"
    assert not text.startswith(f"{place}("), f"{place} has the docstring that dataclasses make"
    if isinstance(found, FunctionType):
        for error in raised(found):
            assert error in text, f"{place} raises {error} and does not say so"


def test_functions_of_several_arguments_name_each_of_them() -> None:
    for place, found in PUBLIC.items():
        if isinstance(found, FunctionType):
            quoted = " ".join(re.findall("`[^`]*`", inspect.getdoc(found) or ""))
            given = inspect.signature(found).parameters.keys() - {"self", "cls"}
            unsaid = given - set(re.findall(r"\w+", quoted))
            assert len(given) < 2 or not unsaid, f"{place} does not say what {unsaid} are"


def test_the_package_says_its_version() -> None:
    project = tomllib.loads((DOCS.parent / "pyproject.toml").read_text(encoding="utf-8"))
    assert pc.__version__ == project["project"]["version"]


def test_the_names_are_those_of_the_reference() -> None:
    text = (DOCS / "reference" / "api.md").read_text() + (
        DOCS / "reference" / "plan.md"
    ).read_text()
    errors = {name for name in pc.__all__ if issubclass_(getattr(pc, name), pc.ParcompilerError)}
    for name in set(pc.__all__) - errors - {"Plan", "Timeline"}:
        assert f".{name}\n" in text, f"{name} is in no page of the reference"
    assert "::: parcompiler.errors" in text


def issubclass_(found: Any, kind: type) -> bool:
    return isinstance(found, type) and issubclass(found, kind)


def test_every_field_of_a_plan_is_described() -> None:
    text = (DOCS / "reference" / "plan.md").read_text()
    for field in dataclasses.fields(Plan):
        assert f"`{field.name}`" in text, f"docs/reference/plan.md says nothing of {field.name}"


def test_every_instruction_is_described() -> None:
    text = (DOCS / "reference" / "instructions.md").read_text()
    for kind in Kind:
        assert f"| `{kind.value} " in text, f"docs/reference/instructions.md has no {kind.value}"
