"""Factory calls in emitted code name their device, in all golden files."""

import ast
from collections.abc import Iterator
from pathlib import Path

GOLDEN = Path(__file__).parents[1] / "golden" / "codegen"
FILES = sorted(GOLDEN.rglob("*.py"))
FACTORIES = frozenset(
    "arange empty empty_strided eye full linspace logspace ones rand randint randn randperm tensor "
    "scalar_tensor tril_indices triu_indices zeros".split()
)


def factory_calls(tree: ast.Module) -> Iterator[ast.Call]:
    """The calls outside of constructors, whose tensors the worker makes on its device."""
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    for function in functions:
        for node in ast.walk(function) if function.name != "__init__" else ():
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner = node.func.value
                if isinstance(owner, ast.Name) and owner.id == "torch":
                    if node.func.attr in FACTORIES:
                        yield node


def test_each_factory_call_names_its_device() -> None:
    calls = [call for file in FILES for call in factory_calls(ast.parse(file.read_text()))]
    assert len(calls) >= 10
    for call in calls:
        assert any(keyword.arg == "device" for keyword in call.keywords), ast.unparse(call)
