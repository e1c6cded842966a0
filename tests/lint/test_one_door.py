"""What Keras, TensorFlow, Ray and pyarrow do not make public is named in raytf/compat/ alone."""

import ast
import pathlib

import raytf
from tests.unit.compat import names

FOLDER = pathlib.Path(raytf.__file__).parent
# Private by their names, and part of Python's own API.
OF_PYTHON = {"_current_frames", "_exit", "_getframe", "_replace"}
# What subclasses ask of their bases in addition to what they override: a function cannot wrap it.
OF_BASES = {
    "parallel/epoch_iterator.py": {"_get_iterator"},
}


def own_names(tree: ast.AST) -> set[str]:
    """Names that a module defines itself, or sets on its own objects."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id == "self":
                found.add(node.attr)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        elif isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return found


def touched(tree: ast.AST) -> set[str]:
    """Private modules and names that a module touches."""
    own, found = own_names(tree), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            paths = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            found |= {path for path in paths if names.is_private(path)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if names.is_private(alias.name)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
            found |= {node.value} if names.is_private(node.value) else set()
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            found |= {node.attr} - own if not node.attr.startswith("_raytf") else set()
    return found


OURS = {
    name
    for path in FOLDER.rglob("*.py")
    for name in own_names(ast.parse(path.read_text()))
    if path.parent.name != "compat"
}


def private_names(path: pathlib.Path) -> set[str]:
    allowed = OF_PYTHON | OF_BASES.get(str(path.relative_to(FOLDER)), set())
    return touched(ast.parse(path.read_text())) - allowed


def test_no_other_room_names_what_is_private():
    found = {str(p.relative_to(FOLDER)): private_names(p) for p in FOLDER.rglob("*.py") if p.parent.name != "compat"}
    # a file may ask another of raytf's for what that one calls its own
    found = {path: its - OURS for path, its in found.items()}
    assert {path: its for path, its in found.items() if its} == {}


def called(tree: ast.AST) -> set[str]:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return {call.func.attr for call in calls if isinstance(call.func, ast.Attribute)}


def test_ray_copies_no_checkpoint_to_this_machine():
    # it takes a lock in a folder of the first user of the host: `folder_contents.local_folder` serves all
    found = {str(p.relative_to(FOLDER)): called(ast.parse(p.read_text())) for p in FOLDER.rglob("*.py")}
    assert {path for path, its in found.items() if its & {"as_directory", "to_directory"}} == set()
    assert called(ast.parse("with saved.as_directory() as folder: pass")) == {"as_directory"}


def test_exceptions_are_needed():
    for path, allowed in OF_BASES.items():
        assert allowed <= touched(ast.parse((FOLDER / path).read_text())), path


def test_it_is_seen():
    assert touched(ast.parse("from keras.src import tree")) == {"keras.src", "keras.src.tree"}
    assert touched(ast.parse("model._flatten_layers()")) == {"_flatten_layers"}
    assert touched(ast.parse("import ray\nray._private.worker")) == {"_private"}
    assert touched(ast.parse("importlib.import_module('ray.data._internal.stats')")) == {"ray.data._internal.stats"}
