"""Finds the keys of a config that a model function always reads, from its source: it is not called."""

from __future__ import annotations

import ast
import builtins
import dataclasses
import inspect
import os
import textwrap
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import Any

# Statements that are executed as a whole.
_PLAIN = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr, ast.Return, ast.Import, ast.ImportFrom, ast.Pass)
# Statements that may be executed in part, or whose code runs later.
_PARTIAL = (ast.For, ast.While, ast.If, ast.With, ast.Try, ast.Assert, ast.Delete, ast.FunctionDef, ast.ClassDef)
_DEFERRED = (ast.Lambda, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_ENDS = (ast.Return, ast.Raise, ast.Yield, ast.YieldFrom, ast.Await)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
# Methods and functions that leave a config as it is.
_READING = ("get", "keys", "values", "items", "copy")
_BUILTINS = ("print", "len", "dict", "list", "sorted", "set", "str", "repr", "bool")
# Number of helpers that call each other.
_DEPTH = 4


def required_keys(function: Callable) -> dict[str, str]:
    """Returns the keys that a function of a config reads unconditionally, each with "FILE, line N".

    It follows helpers that get the config, and passes over loops and branches without a `return`. It ends where
    something else may have changed the config: later statements may read another one. Without a source it returns {}.
    """
    locations: dict[str, str] = {}
    for key, location in _FunctionSource.parse(function).required(0) if isinstance(function, FunctionType) else ():
        locations.setdefault(key, location)
    return locations


@dataclasses.dataclass(frozen=True)
class _FunctionSource:
    """Source of a function of a config.

    Args:
        function: The function.
        body: Its statements.
        config: Name of its parameter.
        first: Number of the line above its first one.
    """

    function: FunctionType
    body: Sequence[ast.stmt]
    config: str
    first: int

    @classmethod
    def parse(cls, function: FunctionType, parameter: int | str = 0) -> _FunctionSource:
        """Returns the source of a function whose parameter, a position or a name, is the config; empty if unknown."""
        try:
            if hasattr(function, "__wrapped__"):  # the decorator may pass another config
                raise OSError
            lines, first = inspect.getsourcelines(function)
            (tree,) = ast.parse(textwrap.dedent("".join(lines))).body
            names = [arg.arg for arg in (*tree.args.posonlyargs, *tree.args.args, *tree.args.kwonlyargs)]
            config = names[parameter] if isinstance(parameter, int) else names[names.index(parameter)]
        except (OSError, TypeError, SyntaxError, ValueError, AttributeError, IndexError):
            return cls(function, (), "", 0)
        return cls(function, tree.body, config, first - 1)

    def required(self, depth: int) -> Iterator[tuple[str, str]]:
        """Yields (key, location) of the keys that are always read, up to a statement after which that is not known."""
        yield from self._keys_of_body(self.body, depth)

    def keeps(self, depth: int) -> bool:
        """Returns whether the function leaves the config as it is."""
        return bool(self.body) and depth < _DEPTH and all(self._harmless(statement, depth) for statement in self.body)

    def _keys_of_body(self, body: Sequence[ast.stmt], depth: int) -> Iterator[tuple[str, str]]:
        for statement in body:
            if isinstance(statement, ast.With) and not _suppresses(statement):
                yield from self._reads([item.context_expr for item in statement.items], depth)
                yield from self._keys_of_body(statement.body, depth)
            elif isinstance(statement, _PLAIN):
                yield from self._reads([statement], depth)
            elif isinstance(statement, (ast.If, ast.While)):
                yield from self._reads([statement.test], depth)
            elif isinstance(statement, ast.For):
                yield from self._reads([statement.iter], depth)
            ends = isinstance(statement, _PARTIAL) and any(isinstance(node, _ENDS) for node in _own_nodes(statement))
            if ends or not isinstance(statement, _PLAIN + _PARTIAL) or not self._harmless(statement, depth):
                return

    def _reads(self, parts: Sequence[ast.AST], depth: int) -> Iterator[tuple[str, str]]:
        """Yields (key, location) of the keys that expressions always read, themselves or by a helper."""
        unknown = {id(use) for part in parts for use in self._unknown_uses(part, depth)}
        helpers = {node: self._helper(node) for part in parts for node in ast.walk(part) if isinstance(node, ast.Call)}
        given = {id(value) for node, helper in helpers.items() if helper for value in _arguments(node)}
        for node in (node for part in parts for node in _sure_nodes(part)):
            if isinstance(node, ast.Subscript) and self._is_config(node.value) and isinstance(node.ctx, ast.Load):
                if isinstance(node.slice, ast.Constant):
                    file = os.path.basename(self.function.__code__.co_filename)
                    yield str(node.slice.value), f"{file}, line {self.first + node.lineno}"
            elif isinstance(node, ast.Call) and (helper := helpers[node]) is not None:
                yield from helper.required(depth + 1) if depth < _DEPTH else ()
                if any(id(value) in unknown for value in _arguments(node)):
                    return
            elif id(node) in unknown - given:
                return

    def _is_config(self, node: ast.AST) -> bool:
        return isinstance(node, ast.Name) and node.id == self.config

    def _harmless(self, statement: ast.AST, depth: int) -> bool:
        return not self._unknown_uses(statement, depth)

    def _unknown_uses(self, statement: ast.AST, depth: int) -> list[ast.Name]:
        """Returns uses of the config that may change it or give it away, also in code that a statement defines."""
        known: set[int] = set()
        for node in ast.walk(statement):
            reads = isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load)
            if reads or (isinstance(node, ast.Attribute) and node.attr in _READING):
                known.add(id(node.value))
            elif isinstance(node, ast.Compare) and all(isinstance(op, (ast.In, ast.NotIn)) for op in node.ops):
                known |= {id(part) for part in node.comparators}
            elif isinstance(node, ast.Dict):
                known |= {id(value) for key, value in zip(node.keys, node.values, strict=True) if key is None}
            elif isinstance(node, ast.Call):
                known |= {id(keyword.value) for keyword in node.keywords if keyword.arg is None}
                known |= {id(value) for value in _arguments(node)} if self._only_reads(node, depth) else set()
        uses = [node for node in ast.walk(statement) if isinstance(node, ast.Name) and self._is_config(node)]
        return [node for node in uses if not isinstance(node.ctx, ast.Load) or id(node) not in known]

    def _only_reads(self, call: ast.Call, depth: int) -> bool:
        """Returns whether a function that gets the config leaves it as it is."""
        name = call.func.id if isinstance(call.func, ast.Name) else ""
        if name in _BUILTINS and self._value_of(name) is getattr(builtins, name):
            return True
        helper = self._helper(call)
        return helper is not None and helper.keeps(depth + 1)

    def _helper(self, call: ast.Call) -> _FunctionSource | None:
        """Returns the source of a called function that gets the config as an argument of its own, or None."""
        positions: list[int | str] = [i for i, part in enumerate(call.args) if self._is_config(part)]
        positions += [str(keyword.arg) for keyword in call.keywords if keyword.arg and self._is_config(keyword.value)]
        starred = any(isinstance(part, ast.Starred) for part in call.args)
        function = self._value_of(call.func.id) if isinstance(call.func, ast.Name) else None
        if isinstance(function, type):
            positions, function = (
                [p + 1 if isinstance(p, int) else p for p in positions],
                vars(function).get("__init__"),
            )
        if len(positions) != 1 or starred or not isinstance(function, FunctionType):
            return None
        return _FunctionSource.parse(function, positions[0])

    def _value_of(self, name: str) -> Any:
        try:
            variables = inspect.getclosurevars(self.function)
        except ValueError:
            return None
        return {**variables.builtins, **variables.globals, **variables.nonlocals}.get(name)


def _arguments(call: ast.Call) -> list[ast.AST]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def _suppresses(statement: ast.With) -> bool:
    """Returns whether a `with` may end its body early without an error, as `contextlib.suppress` does."""
    calls = [item.context_expr for item in statement.items]
    return any("suppress" in ast.unparse(call) or "raises" in ast.unparse(call) for call in calls)


def _own_nodes(statement: ast.AST) -> Iterator[ast.AST]:
    """Yields a statement's nodes without those of functions and classes that it defines."""
    if isinstance(statement, _DEFERRED):
        return
    yield statement
    for child in ast.iter_child_nodes(statement):
        yield from _own_nodes(child)


def _sure_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes of an expression, or of a plain statement, that are always evaluated."""
    if isinstance(node, _DEFERRED):
        return
    children: Sequence[ast.AST] = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.IfExp):
        children = [node.test]
    elif isinstance(node, ast.BoolOp):
        children = node.values[:1]
    elif isinstance(node, _COMPREHENSIONS):
        children = [node.generators[0].iter]
    for child in children:
        yield from _sure_nodes(child)
    yield node
