"""No wait on several actors goes by their ranks: `answers.in_completion_order` takes answers as they come."""

import ast
import pathlib

import pytest

import raytf

FOLDER = pathlib.Path(raytf.__file__).parent
# Waits that are in the tree, by module: those for blocks of data may stay, as no peer of theirs is waited for.
WAITS = {
    "data/stored": 1,
    "identity/fingerprint": 1,
    "data/partitions": 1,
    "data/reader": 2,
    "data/class_names": 1,
}


def is_get(node):
    return isinstance(node, ast.Call) and ast.unparse(node.func) in ("ray.get", "get") and node.args


def waits(text):
    """Lines in which several things are waited for in their order."""
    several = (ast.List, ast.Tuple, ast.ListComp, ast.GeneratorExp)
    made = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
    found = set()
    for node in ast.walk(ast.parse(text)):
        if is_get(node) and isinstance(node.args[0], several):
            found.add(node.lineno)
        elif isinstance(node, made):
            parts = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
            found |= {inner.lineno for part in parts for inner in ast.walk(part) if is_get(inner)}
        elif isinstance(node, ast.For):
            looped = {name.id for name in ast.walk(node.target) if isinstance(name, ast.Name)}
            for inner in (i for part in node.body for i in ast.walk(part)):
                if is_get(inner) and isinstance(inner.args[0], ast.Name) and inner.args[0].id in looped:
                    over = ast.unparse(node.iter)
                    as_they_come = "in_completion_order" in over or "_as_they_come" in over
                    found |= set() if as_they_come else {inner.lineno}
    return sorted(found)


@pytest.mark.parametrize(
    "text",
    [
        "ray.get([a.f.remote() for a in actors])",
        "ray.get([first, second], timeout=3)",
        "found = [ray.get(ref) for ref in refs]",
        "found = {name: ray.get(ref) for name, ref in refs.items()}",
        "for ref in refs:\n    found.append(ray.get(ref))",
    ],
)
def test_they_are_seen(text):
    assert waits(text)


def test_answers_are_taken_as_they_come():
    modules = {str(path.relative_to(FOLDER).with_suffix("")): path for path in FOLDER.rglob("*.py")}
    found = {name: waits(path.read_text()) for name, path in modules.items()}
    assert {name: len(lines) for name, lines in found.items() if lines and name not in WAITS} == {}, found
    assert all(len(found[name]) <= count for name, count in WAITS.items()), found


def test_what_is_there_is_still_there():
    """The list shrinks as waits go."""
    assert {name: len(waits((FOLDER / f"{name}.py").read_text())) for name in WAITS} == WAITS
