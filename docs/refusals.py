"""Writes the texts of errors into `reference/errors.md`, by the part of raytf that raises them.

    python docs/refusals.py

`make docs` does it first; a test fails if the page is not current.
"""

from __future__ import annotations

import ast
import collections
import itertools
import pathlib
import re
from collections.abc import Iterator

from generated import filled

PAGE = pathlib.Path(__file__).parent / "reference" / "errors.md"
_SOURCES = PAGE.parents[2] / "raytf"
# Errors, and the argument with their text; `ConfigError` and its subclasses have three.
_TEXTS = {"RaytfError": "{0}", "UnsupportedVersionError": "{0}", "StreamError": "{0}", "ServerLostError": "{0}"}
_TEXTS |= {"TrainingError": "{1}", "StoppedError": "{1}", "StoppedCallError": "{1}"}
_RULES = ("ConfigError", "ResourceError", "ScratchError", "DamagedCheckpointError", "UnknownMetricError")
_TEXTS |= dict.fromkeys(_RULES, "{0}; received: {1}. {2}.")
_BODIES = ("body", "orelse", "finalbody")
_LEAST_LETTERS, _MOST_BRANCHES = 16, 6


def _texts(node: ast.expr, known: dict[str, list[ast.expr]]) -> list[str]:
    """What a string expression may give, with `…` for each value that is not in the source."""
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.FormattedValue(value=value):
            return _texts(value, known)
        case ast.IfExp(body=first, orelse=second):
            return _texts(first, known) + _texts(second, known)
        case ast.JoinedStr(values=parts):
            return ["".join(chosen) for chosen in _choices(parts, known)]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return ["".join(chosen) for chosen in _choices([left, right], known)]
        case ast.Name(id=name) if name in known:
            others = {key: values for key, values in known.items() if key != name}
            return [text for value in known[name] for text in _texts(value, others)]
    return ["…"]


def _choices(parts, known):
    return itertools.islice(itertools.product(*(_texts(part, known) for part in parts)), _MOST_BRANCHES)


def _assigned(statements: list[ast.stmt], error: ast.Call) -> dict[str, list[ast.expr]]:
    """The values that names may have where the error is made: an assignment replaces those before it, a branch adds."""
    known: dict[str, list[ast.expr]] = {}
    for statement in statements:
        nodes = list(ast.walk(statement))
        if error in nodes:
            bodies = (getattr(node, part, None) for node in nodes for part in _BODIES)
            lists = (body for body in bodies if isinstance(body, list))
            inner = (body for body in lists if any(error in ast.walk(each) for each in body))
            return known | _assigned(next(inner, []), error)
        for node in (node for node in nodes if isinstance(node, ast.Assign)):
            if isinstance(name := node.targets[0], ast.Name):
                named = {getattr(each, "id", "") for each in ast.walk(node.value)}
                is_replaced = node is statement and name.id not in named
                earlier = [] if is_replaced else known.get(name.id, [])
                known[name.id] = [*earlier, node.value]
    return known


def _name(call: ast.Call) -> str:
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def _key(path: pathlib.Path, function: ast.FunctionDef) -> tuple[pathlib.Path | None, str]:
    """The key of calls of a function: those in its file, of public functions of a module those in all files."""
    is_method = any(argument.arg in ("self", "cls") for argument in function.args.args[:1])
    return path if is_method or function.name.startswith("_") else None, function.name


def _found_in(path: pathlib.Path, tree: ast.Module, calls) -> Iterator[str]:
    """The texts of the errors that a file makes; `calls` are those of the functions that may make them, by `_key`."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    scopes = {node: function for function in functions for node in ast.walk(function)}  # the innermost is the last
    for error in (node for node in scopes if isinstance(node, ast.Call) and _name(node) in _TEXTS):
        function = scopes[error]
        constants = [node for node in tree.body if isinstance(node, ast.Assign)]
        known = _assigned(constants, error) | _assigned(function.body, error)
        names = [a.arg for a in function.args.args if a.arg not in ("self", "cls")]
        for call in calls[_key(path, function)] or [ast.Call(ast.Name(""), [], [])]:
            given = {name: [value] for name, value in zip(names, call.args, strict=False)}
            given |= {word.arg: [word.value] for word in call.keywords}
            for chosen in _choices([*error.args, *[ast.Constant(None)] * 3][:3], known | given):
                text = re.sub("……+", "…", " ".join(_TEXTS[_name(error)].format(*chosen).split()).replace("?.", "?"))
                is_clause = text.startswith("…;")  # what follows the text of another error
                if not is_clause and len(re.sub(r"received|\W", "", text)) >= _LEAST_LETTERS:
                    yield text


def sections() -> str:
    """A section for each folder, and each file, of `raytf/` that makes errors."""
    trees = {path: ast.parse(path.read_text()) for path in sorted(_SOURCES.rglob("*.py"))}
    calls, found = collections.defaultdict(list), collections.defaultdict(set)
    for path, node in ((path, node) for path, tree in trees.items() for node in ast.walk(tree)):
        if isinstance(node, ast.Call):
            calls[path, _name(node)].append(node)
            calls[None, _name(node)].append(node)
    for path, tree in trees.items():
        topic = path.relative_to(_SOURCES).parts[0].removesuffix(".py")
        found[topic].update(_found_in(path, tree, calls))
    return "\n".join(_section(topic, texts) for topic, texts in sorted(found.items()) if texts)


def _section(topic: str, texts: set[str]) -> str:
    """The texts of a folder, without those that another one quotes at its end, after the name of an option."""
    quoted = {text.partition(": ")[2] for text in texts if text.startswith("--")}
    items = "".join(f"* `` {text} ``\n" for text in sorted(texts - quoted))
    return f"## raytf.{topic}\n\n{items}"


def written(page: str) -> str:
    """The page with the present texts, between its two comments."""
    return filled(page, "refusals.py", sections())


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
