"""Names in docstrings and comments of raytf exist in its code."""

from __future__ import annotations

import ast
import collections
import io
import pathlib
import re
import tokenize
from collections.abc import Iterator

import pytest

import raytf

FOLDER = pathlib.Path(raytf.__file__).parent
FILES = sorted(FOLDER.rglob("*.py"))
TREES = {path: ast.parse(path.read_text()) for path in FILES}
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
# A name, or several with dots, also with arguments.
NAME = re.compile(r"([A-Za-z_]\w*(?:\.\w+)*)(\(.*\))?", re.DOTALL)
QUOTED = re.compile(r"(?<!`)`([^`]+)`(?!`)")
KEYWORD = re.compile(r"(?<![\w./\"'-])([a-z_]\w*)=(?!=)")
# Names of Keras, TensorFlow, Ray and Kubernetes that raytf's code does not contain, and endings of names.
OTHERS = {"IntegerLookup", "get_vocabulary", "summarize", "map_graph", "GraphDef", "LearningRateSchedule", "embeddings"}
OTHERS |= {"kubectl", "int64_list", "fn_constructor_args", "fn_constructor_kwargs", "_INTERVAL", "_patience"}
# Objects of the same names as modules, in examples.
OBJECTS = {"context", "dataset", "strategy"}
PACKAGES = {"keras", "tensorflow", "tf", "ray"}


def words_of(tree: ast.AST) -> set[str]:
    """Returns the names in the code of a tree, and the words in its literals; docstrings apart."""
    found = set()
    no_code = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                found.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.keyword(arg=str(name)):
                found.add(name)
            case ast.alias(name=name, asname=alias):
                found |= {*name.split("."), alias}
            case ast.ImportFrom(module=str(name)):
                found |= set(name.split("."))
            case ast.Constant(value=str(text)) if id(node) not in no_code:
                found |= set(re.findall(r"\w+", text))
    return found


def keywords_of(tree: ast.AST) -> set[str]:
    """Returns the names of arguments and fields in a tree."""
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.arg(arg=name) | ast.keyword(arg=str(name)) | ast.AnnAssign(target=ast.Name(id=name)):
                found.add(name)
    return found


def members(node: ast.AST) -> set[str]:
    """Returns what a class or a module defines, in its functions as well."""
    found = set()
    for part in ast.walk(node):
        match part:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                found.add(name)
    return found


WORDS = set().union(*map(words_of, TREES.values()), *(path.relative_to(FOLDER).with_suffix("").parts for path in FILES))
KEYWORDS = set().union(*map(keywords_of, TREES.values()))
CLASSES = {node.name: node for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
MODULES: dict[str, set[str]] = collections.defaultdict(set)
for _path, _tree in TREES.items():
    MODULES[_path.stem] |= words_of(_tree)


def members_of_class(name: str) -> set[str]:
    """Returns what a class of raytf, and its bases of raytf, define."""
    if name not in CLASSES:
        return set()
    bases = [ast.unparse(base).split(".")[-1] for base in CLASSES[name].bases]
    return members(CLASSES[name]).union(*map(members_of_class, bases))


def docstrings(tree: ast.AST) -> Iterator[tuple[int, ast.AST, str]]:
    """Yields (line, node, docstring)."""
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
            yield getattr(node, "lineno", 1), node, text


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yields (line, comment)."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def names_in(text: str, title: str) -> list[str]:
    """Returns the names in a section of a docstring, such as Attributes."""
    _, _, section = text.partition(f"\n{title}:\n")
    section = re.split(r"^\w+:$", section, maxsplit=1, flags=re.MULTILINE)[0]
    found = re.findall(r"^    ((?:\w+(?:, )?)+):", section, re.MULTILINE)
    return [name for names in found for name in names.split(", ")]


def unknown(text: str) -> list[str]:
    """Returns names in backticks that look like names of raytf's code, and do not exist in it."""
    found = []
    for quoted in QUOTED.findall(text):
        match = NAME.fullmatch(quoted.strip())
        if match is None:
            continue
        *owners, name = match[1].split(".")
        if not owners:
            exists = name in WORDS | OTHERS
        elif owners[0] in PACKAGES:
            exists = True
        elif name in ("py", "npz"):  # a file
            exists = name != "py" or owners[-1] in MODULES
        elif owners[-1] in CLASSES:
            exists = name in members_of_class(owners[-1])
        else:
            exists = owners[-1] not in MODULES or owners[-1] in OBJECTS or name in MODULES[owners[-1]]
        if not exists:
            found.append(quoted)
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda f: f.relative_to(FOLDER).as_posix())
def test_documented_attributes_exist(path):
    found = [
        f"{path}:{line} {node.name} has no {name}"
        for line, node, text in docstrings(TREES[path])
        if isinstance(node, ast.ClassDef)
        for name in names_in(text, "Attributes")
        if name not in members_of_class(node.name)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("path", FILES, ids=lambda f: f.relative_to(FOLDER).as_posix())
def test_names_in_docstrings_and_comments_exist(path):
    texts = [*((line, text) for line, _, text in docstrings(TREES[path])), *comments(path.read_text())]
    found = [f"{path}:{line} `{name}`" for line, text in texts for name in unknown(text)]
    found += [
        f"{path}:{line} {name}="
        for line, _, text in docstrings(TREES[path])
        for name in KEYWORD.findall(text)
        if name not in KEYWORDS | OTHERS
    ]
    found += [
        f"{path}:{line} {name}"
        for line, _, text in docstrings(TREES[path])
        for name in names_in(text, "Raises")
        if name not in WORDS
    ]
    assert not found, "the code does not have\n" + "\n".join(found)


def test_other_names_are_used():
    """Names of other packages that no docstring contains any more leave the list."""
    texts = "\n".join(path.read_text() for path in FILES)
    unused = sorted(name for name in OTHERS if not re.search(rf"\b{name}\b", texts))
    assert not unused, f"remove them from this test: {unused}"


@pytest.mark.parametrize(
    "text", ["see `no_such_function`", "`KerasTrainer.no_such`", "`verify.no_such`", "`NoSuchClass`", "`no_such.py`"]
)
def test_names_that_do_not_exist_are_noticed(text):
    assert unknown(text)


@pytest.mark.parametrize(
    "text", ["`KerasTrainer.fit`", "`verify.outcome`", "`fit(x)`", "`verify.py`", "`tf.data`", "`a + b`", "``no_such``"]
)
def test_names_that_exist_are_allowed(text):
    assert not unknown(text)


def test_attributes_are_read_from_their_section():
    text = "A class.\n\nArgs:\n    a: x.\n\nAttributes:\n    b, c: x.\n        d: x.\n    e: x.\n\nRaises:\n    F: x."
    assert names_in(text, "Attributes") == ["b", "c", "e"] and names_in(text, "Raises") == ["F"]
