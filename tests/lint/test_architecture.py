"""Where TensorFlow is imported, and names; which room imports which is in pyproject.toml (`make lint`)."""

import ast
import contextlib
import functools
import pathlib

import pytest

import raytf

# Rooms whose files may import TensorFlow or Keras as they are imported; of the others nobody waits for it.
WITH_TENSORFLOW = {"collectives", "data", "parallel", "worker", "parameter_server", "fitting"}
# Of these rooms, what drivers and processes without TensorFlow import.
WITHOUT = {
    "raytf.collectives.failure_notifier",
    "raytf.collectives.ring",
    "raytf.collectives.ring_links",
    "raytf.collectives.ring_listener",
    "raytf.collectives.ring_token",
    "raytf.collectives.scaled_float16",
    "raytf.data.block_statistics",
    "raytf.data.columns",
    "raytf.data.file_source",
    "raytf.data.files",
    "raytf.data.formats",
    "raytf.data.gather",
    "raytf.data.ingest",
    "raytf.data.partitions",
    "raytf.data.reader",
    "raytf.data.record_files",
    "raytf.data.records",
    "raytf.data.sampling",
    "raytf.data.stored",
    "raytf.data.streamed",
    "raytf.data.tfrecords",
    "raytf.parallel.model_optimizers",
    "raytf.parameter_server.servers",
    "raytf.fitting.fit_worker",
    "raytf.fitting.predictor",
    "raytf.fitting.warm",
    "raytf.worker.callback_state",
    "raytf.worker.checkpoint",
    "raytf.worker.checkpoint_every",
    "raytf.worker.checkpoint_selector",
    "raytf.worker.model_loading",
    "raytf.worker.model_source",
    "raytf.worker.clearing",
    "raytf.worker.stop",
    "raytf.worker.export",
    "raytf.worker.inputs",
    "raytf.worker.job",
    "raytf.worker.random_state",
    "raytf.worker.mean_weights",
    "raytf.worker.session",
    "raytf.worker.trial_session",
}
# The door to Keras and TensorFlow, which imports them; what is left of it does without.
DOORS = {"raytf.compat.keras", "raytf.compat.multi_worker", "raytf.compat.tensorflow"}
FOLDER = pathlib.Path(raytf.__file__).parent


def _name(path: pathlib.Path) -> str:
    parts = ("raytf", *path.relative_to(FOLDER).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {_name(path): path for path in FOLDER.rglob("*.py")}


@functools.cache
def imported(name: str, nested: bool) -> frozenset:
    """What a module imports: at its top, or anywhere."""
    tree = ast.parse(MODULES[name].read_text())
    found = set()
    for node in ast.walk(tree) if nested else tree.body:
        if isinstance(node, ast.ImportFrom):
            wholes = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (wholes & MODULES.keys()) | ({node.module} if wholes - MODULES.keys() else set())
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return frozenset(found)


def own(name: str, nested: bool) -> set:
    return {m for m in imported(name, nested) if m in MODULES}


def room(name: str) -> str:
    return [*name.split("."), ""][1]


def takes_tensorflow(name: str) -> bool:
    """Whether TensorFlow or Keras comes with a module."""
    seen, left = set(), [name]
    while left:
        module = left.pop()
        if {m.split(".")[0] for m in imported(module, False)} & {"tensorflow", "keras"}:
            return True
        seen.add(module)
        left += own(module, False) - seen
    return False


def test_every_room_documents_its_purpose():
    for path in FOLDER.rglob("__init__.py"):
        if path.parent != FOLDER:
            (only,) = ast.parse(path.read_text()).body
            assert isinstance(only, ast.Expr) and isinstance(only.value.value, str), f"{path} is one docstring"


@pytest.mark.parametrize("name", sorted(MODULES))
def test_a_long_file_gives_its_reason(name):
    text = MODULES[name].read_text()
    long, reason = len(text.splitlines()) > 500, "\nOver 500 lines: " in ast.get_docstring(ast.parse(text), clean=False)
    assert long == reason, f"{name}: a file of more than 500 lines, and no other, ends its docstring with the reason"


def test_tensorflow_is_imported_where_it_belongs():
    for name in MODULES:
        allowed = name in DOORS or (room(name) in WITH_TENSORFLOW and name not in WITHOUT)
        assert allowed or not takes_tensorflow(name), name
    assert {name for name in WITHOUT if name not in MODULES} == set()


def test_imports_inside_functions_are_those_that_bring_tensorflow():
    """A module that does without TensorFlow, imported by drivers, may import what needs it where it is called.

    The command line and the face of the package import anything late.
    """
    late = {"raytf", "raytf.cli", "raytf.cli_runs"}
    # what differs between Keras 2 and 3 is imported where it is known which of them this process has
    late |= {"raytf.worker.context", "raytf.worker.strategy", "raytf.worker.callbacks", "raytf.train.backend"}
    late |= {"raytf.data.feed"}
    for name in MODULES.keys() - late:
        for other in own(name, True) - own(name, False):
            if room(other) == "compat":  # it brings Ray or Keras, for a function that needs them
                continue
            assert takes_tensorflow(other) and not takes_tensorflow(name), f"{name} imports {other} in a function"


ROOT = FOLDER.parent
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for folder in ("raytf", "tests", "jobs")
    for path in (ROOT / folder).rglob("*.py")
    if path.name != "__init__.py"
}


@functools.cache
def defined(name: str) -> frozenset:
    """All names that a file binds, anywhere."""
    found = {"__name__", "__file__", "__doc__"}
    for node in ast.walk(ast.parse(FILES[name].read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
    return frozenset(found)


def unknown(tree: ast.Module) -> list[str]:
    """Names that a file takes from other files, and that these do not define.

    They are in `module.name`, in `monkeypatch.setattr(module, "name", ...)`, and in programs in strings.
    """
    nodes = list(ast.walk(tree))
    modules = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in nodes
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if f"{node.module}.{alias.name}" in FILES
    }
    other = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    other |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    used = [
        (node.lineno, node.value.id, node.attr)
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    ]
    for node in nodes:
        is_set = isinstance(node, ast.Call) and ast.unparse(node.func).endswith("setattr") and len(node.args) > 1
        if is_set and isinstance(node.args[0], ast.Name) and isinstance(node.args[1], ast.Constant):
            used.append((node.lineno, node.args[0].id, node.args[1].value))
    missing = [
        f"line {line}: {modules[module]} has no {name}"
        for line, module, name in used
        if module in modules and module not in other and name not in defined(modules[module])
    ]
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "from raytf" in node.value:
            with contextlib.suppress(SyntaxError):
                missing += [f"line {node.lineno}, in a program: {text}" for text in unknown(ast.parse(node.value))]
    return missing


@pytest.mark.parametrize(
    "text",
    [
        "limits.get(), limits.gone",
        "monkeypatch.setattr(limits, 'gone', 3)",
        "PROGRAM = 'from PACKAGE import timeouts\\ntimeouts.gone'",
    ],
)
def test_an_unknown_name_is_found(text):
    text = text.replace("PACKAGE", "raytf")  # as this file is searched, too
    assert len(unknown(ast.parse(f"from raytf import timeouts as limits\n{text}"))) == 1


def test_a_name_of_another_module_exists():
    """One that was moved would be missed where it is used, in the middle of a training."""
    found = {name: missing for name, path in FILES.items() if (missing := unknown(ast.parse(path.read_text())))}
    assert not found


def test_programs_without_raytf_import_nothing_of_it():
    """What filters lines runs next to each process that imports TensorFlow, by its path, without site-packages."""
    assert not own("raytf.console.native_lines", True)


def test_a_class_has_a_name_of_its_own():
    """Who reads or searches for one finds one; a leading underscore is no difference."""
    places: dict[str, list[str]] = {}
    for path in sorted(pathlib.Path(raytf.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name.strip("_"), []).append(f"{path.name}:{node.lineno}")
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
