"""Private names that `raytf/compat` touches: listed from its sources, and looked up where they should be.

A module imports a private name with a comment that gives the reason, or a function lists by `uses_private` which
attributes it touches. Where versions differ, `if at_least("ray", 2, 60):` is before the import or in `added_in=`, so
that a name counts only for versions that should have it.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import pathlib
import re
from collections.abc import Iterator

import raytf.compat
from raytf.compat import versions

COMPAT = pathlib.Path(raytf.compat.__file__).parent
PACKAGES = ("keras", "ray", "tensorflow", "tf_keras", "pyarrow")
# Packages whose modules are private by their place.
_PRIVATE_PLACES = (
    "keras.src",
    "tensorflow.python",
    "tf_keras.src",
    "tf_keras.api",
    "ray.train.v2",
    "ray.core.generated",
)


@dataclasses.dataclass(frozen=True)
class Name:
    """A private name.

    Args:
        path: "module:attribute", or "module:Class.attribute" for what objects of a class have.
        why: what for, and which public way is missing.
        place: file and line.
    """

    path: str
    why: str
    place: str


def is_private(module: str) -> bool:
    """Returns whether a module is private: by a leading underscore, or by its package."""
    parts = module.split(".")
    if parts[0] not in PACKAGES:
        return False
    inside = any(module == place or module.startswith(f"{place}.") for place in _PRIVATE_PLACES)
    return inside or any(part.startswith("_") for part in parts)


def listed() -> list[Name]:
    """The private names of the modules of `raytf/compat`, as far as the installed versions should have them."""
    return [name for file in sorted(COMPAT.glob("*.py")) for name in _of_file(file)]


def _of_file(file: pathlib.Path) -> Iterator[Name]:
    text = file.read_text()
    yield from _of_nodes(ast.parse(text).body, text.splitlines(), file.name)


def _of_nodes(nodes: list, lines: list[str], file: str, why: str = "") -> Iterator[Name]:
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            module = node.module or ""
            for alias in node.names:
                if is_private(module) or is_private(f"{module}.{alias.name}") or _is_underscored(module, alias.name):
                    reason = _comment(lines, alias.lineno) or _comment(lines, node.lineno) or why
                    yield Name(f"{module}:{alias.name}", reason, f"{file}:{alias.lineno}")
        elif isinstance(node, ast.If):
            holds = _holds(node.test)
            yield from _of_nodes(node.body if holds in (True, None) else [], lines, file, why)
            yield from _of_nodes(node.orelse if holds in (False, None) else [], lines, file, why)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            reason = (ast.get_docstring(node) or "").partition("\n\n")[0].replace("\n", " ") or why
            for decorator in node.decorator_list:
                yield from _of_uses(decorator, reason, f"{file}:{node.lineno}")
            yield from _of_nodes(node.body, lines, file, reason)
        elif isinstance(node, (ast.With, ast.Try, ast.For)):
            yield from _of_nodes(node.body, lines, file, why)


def _is_underscored(module: str, name: str) -> bool:
    return module.split(".")[0] in PACKAGES and name.startswith("_")


def _comment(lines: list[str], number: int) -> str:
    """The comment at the end of a line, or on the lines before it."""
    at_end = re.search(r"  # (?!noqa)(.*)", lines[number - 1])
    if at_end:
        return at_end[1]
    found = []
    while number >= 2 and (before := lines[number - 2].strip()).startswith("# "):
        found.insert(0, before.removeprefix("# "))
        number -= 1
    return " ".join(found)


def _holds(test: ast.expr) -> bool | None:
    """Returns the value of `at_least(...)` or `not at_least(...)` for the installed versions; None of another test."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        held = _holds(test.operand)
        return None if held is None else not held
    if isinstance(test, ast.Call) and isinstance(test.func, ast.Name) and test.func.id == "at_least":
        return versions.at_least(*(ast.literal_eval(argument) for argument in test.args))
    return None


def _of_uses(decorator: ast.expr, why: str, place: str) -> Iterator[Name]:
    if not (
        isinstance(decorator, ast.Call) and isinstance(decorator.func, ast.Name) and decorator.func.id == "uses_private"
    ):
        return
    bounds = {keyword.arg: ast.literal_eval(keyword.value) for keyword in decorator.keywords}
    if "added_in" in bounds and not versions.at_least(*bounds["added_in"]):
        return
    for argument in decorator.args:
        yield Name(ast.literal_eval(argument), why, place)


def unresolved(names: list[Name]) -> list[str]:
    """What is wrong with names, a clause for each that is not where it should be."""
    found = []
    for name in names:
        try:
            resolve(name.path)
        except (ImportError, AttributeError) as error:
            found.append(f"{name.path} ({error})")
    return found


def resolve(path: str):
    """The object of a path; of what only objects of a class have, None.

    Raises:
        ImportError, AttributeError: it is not there.
    """
    module, _, attributes = path.partition(":")
    owner = importlib.import_module(module)
    for name in attributes.split(".") if attributes else []:
        try:
            owner = getattr(owner, name)
        except AttributeError:
            if inspect.ismodule(owner) and not name.startswith("__"):
                owner = importlib.import_module(f"{owner.__name__}.{name}")
            elif isinstance(owner, type) and _sets(owner, name):
                return None
            else:
                raise
    return owner


def _sets(kind: type, name: str) -> bool:
    """Whether methods of a class set an attribute on its objects, or its fields name it."""
    for base in kind.__mro__:
        if name in getattr(base, "__annotations__", {}):
            return True
        for member in vars(base).values():
            code = getattr(inspect.unwrap(getattr(member, "fget", None) or member), "__code__", None)
            if code is not None and name in code.co_names:
                return True
    return False


def import_all() -> None:
    """Imports the modules of raytf that say replacements or overrides."""
    root = COMPAT.parent
    for file in sorted(root.rglob("*.py")):
        text = file.read_text()
        if "\n@patch(" in text or "    @overrides(" in text:
            importlib.import_module(".".join(("raytf", *file.relative_to(root).with_suffix("").parts)))
