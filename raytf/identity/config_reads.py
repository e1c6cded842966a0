"""Which keys of a config a function reads, found in its source without calling it. Pure."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any

_COMPOUND = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.Try, ast.With, ast.AsyncWith, ast.Match)
_LATER = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def mentioned(function: Callable) -> set[str]:
    """Returns the string constants of a function, and of the functions and classes of its package that it names."""
    found: set[str] = set()
    seen: set[int] = set()
    waiting: list[Any] = [function]
    package = _package(_unwrapped(function))
    while waiting:
        value = _unwrapped(waiting.pop())
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, FunctionType):
            codes = list(_codes(value.__code__))
            found |= {const for code in codes for const in _strings(code.co_consts)}
            cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
            names = {name for code in codes for name in code.co_names}
            waiting += [value.__globals__[name] for name in names if name in value.__globals__]
            waiting += [*cells, *(value.__defaults__ or ())]
        elif isinstance(value, type) and _package(value) == package:
            waiting += vars(value).values()
        waiting = [one for one in waiting if _may_hold_code(one) and _package(_unwrapped(one)) == package]
    return found


def required(function: Callable) -> dict[str, int]:
    """Returns the keys that a function of a config reads whatever happens, with `config[key]`, and their lines.

    Where the source is not known, or the config is passed on or changed before, the keys after that are left out.
    """
    try:
        lines, first = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(lines))).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):
        return {}
    if not isinstance(tree, ast.FunctionDef) or not tree.args.posonlyargs + tree.args.args:
        return {}
    config, found = (tree.args.posonlyargs + tree.args.args)[0].arg, {}
    for statement in tree.body:
        if isinstance(statement, _LATER):
            continue
        parts = _heads(statement) if isinstance(statement, _COMPOUND) else [statement]
        reads = [read for part in parts for read in _reads(part, config)]
        escapes = any(_escapes(part, config) for part in parts)
        if not escapes:
            for key, line in reads:
                found.setdefault(key, first + line - 1)
        if escapes or _ends(statement, config):
            break
    return found


def _heads(statement: ast.stmt) -> list[ast.AST]:
    """Returns what a compound statement evaluates in any case."""
    return [getattr(statement, name) for name in ("test", "iter", "subject") if hasattr(statement, name)]


def _ends(statement: ast.stmt, config: str) -> bool:
    """Whether what follows a statement may not run, or may see another config."""
    if isinstance(statement, (ast.Return, ast.Raise)):
        return True
    if not isinstance(statement, _COMPOUND):
        return False
    leaves = any(isinstance(node, (ast.Return, ast.Raise)) for node in ast.walk(statement))
    return leaves or _escapes(statement, config)


def _reads(node: ast.AST, config: str) -> Iterator[tuple[str, int]]:
    """Yields (key, line) of each `config[key]` that is evaluated whenever the node is."""
    if isinstance(node, (*_LATER, *_COMPREHENSIONS)):
        return
    if isinstance(node, ast.Subscript) and _is_name(node.value, config) and isinstance(node.ctx, ast.Load):
        if isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
            yield node.slice.value, node.lineno
        return
    children: list[ast.AST] = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.IfExp):
        children = [node.test]
    elif isinstance(node, ast.BoolOp):
        children = [node.values[0]]
    elif isinstance(node, ast.Compare):
        children = [node.left, node.comparators[0]]
    elif isinstance(node, ast.Assert):
        children = [node.test]
    for child in children:
        yield from _reads(child, config)


def _escapes(node: ast.AST, config: str) -> bool:
    """Whether the config is used otherwise than to read a key of it: what follows may see another one."""
    harmless = set()
    for inner in ast.walk(node):
        is_read = isinstance(inner, ast.Subscript) and isinstance(inner.ctx, ast.Load)
        is_get = isinstance(inner, ast.Attribute) and inner.attr == "get"
        is_test = isinstance(inner, ast.Compare) and all(isinstance(op, (ast.In, ast.NotIn)) for op in inner.ops)
        if is_read or is_get:
            harmless.add(id(inner.value))
        elif is_test:
            harmless |= {id(one) for one in inner.comparators}
    return any(_is_name(inner, config) and id(inner) not in harmless for inner in ast.walk(node))


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _unwrapped(value: Any) -> Any:
    while isinstance(value, (functools.partial, MethodType, staticmethod, classmethod)):
        value = value.func if isinstance(value, functools.partial) else value.__func__
    call = vars(type(value)).get("__call__")  # of an object of the user's that is called as a function
    return call if isinstance(call, FunctionType) else value


def _may_hold_code(value: Any) -> bool:
    return isinstance(_unwrapped(value), (FunctionType, type))


def _package(value: Any) -> str:
    return str(getattr(value, "__module__", "")).partition(".")[0]


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _codes(const)


def _strings(constants: Any) -> Iterator[str]:
    for const in constants:
        if isinstance(const, str):
            yield const
        elif isinstance(const, (tuple, frozenset)):
            yield from _strings(const)


def _is_filled(cell) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
