"""Every private name is where raytf looks for it, with the signature that is recorded: an upgrade fails here first."""

import ast
import pathlib
import re

import pytest

from raytf.compat import patching, versions
from raytf.errors import UnsupportedVersionError
from tests.unit.compat import names, signatures

DOORS = ("keras_objects", "ray_configs", "ray_core", "ray_data", "ray_train", "ray_tune", "tensorflow")


@pytest.fixture(scope="module", autouse=True)
def all_imported():
    names.import_all()


def test_names_resolve():
    found = names.listed()
    assert len(found) > 100
    assert names.unresolved(found) == []


def test_each_private_name_has_a_reason():
    assert [name.path for name in names.listed() if len(name.why) < 10] == []
    assert [one.path for one in patching.replacements() if not one.function.__doc__] == []


def test_signatures_are_as_recorded():
    assert signatures.changed() == []


def test_functions_list_the_attributes_they_touch():
    """A private attribute in a function is one of its `uses_private`, or of a name that the module imports."""
    for path in sorted(names.COMPAT.glob("*.py")):
        if path.stem not in (
            "keras_objects",
            "ray_configs",
            "ray_core",
            "ray_data",
            "ray_train",
            "ray_tune",
            "tensorflow",
        ):
            continue
        for function in ast.parse(path.read_text()).body:
            if not isinstance(function, ast.FunctionDef):
                continue
            listed = re.findall(r"\w+", " ".join(ast.unparse(d) for d in function.decorator_list))
            for node in ast.walk(function):
                if isinstance(node, ast.Attribute) and re.match("_[a-z]", node.attr):
                    modules = ("_private", "_lock", "_initial_epoch", "_keras_history")  # the last is set on objects
                    assert node.attr in listed or node.attr in modules, (
                        f"{path.name}: {function.name} touches {node.attr}"
                    )


def test_overrides_are_called():
    """Ray, Keras and TensorFlow call by its name what raytf overrides, or sets for them to read."""
    called = {"ray": pathlib.Path(names.resolve("ray:train").__file__).parents[1]}
    texts = "\n".join(p.read_text() for p in (called["ray"] / "train").rglob("*.py") if "test" not in p.parts)
    texts += "\n".join(p.read_text() for p in (called["ray"] / "tune" / "schedulers").glob("*.py"))
    keras = pathlib.Path(names.resolve("keras.src:trainers").__file__).parents[1]
    texts += "\n".join(p.read_text() for p in keras.rglob("*.py") if not p.name.endswith("_test.py"))
    tensorflow = pathlib.Path(names.resolve("tensorflow.python:distribute").__file__).parent
    texts += "\n".join(p.read_text() for p in tensorflow.glob("*.py"))
    assert len(patching.overridden()) > 8
    for one in patching.overridden():
        assert hasattr(one.owner, one.name), f"{one.path} is gone"
        by_name = rf"\.{one.name}\(|\"{one.name}\"|'{one.name}'"
        assert re.search(by_name, texts), f"nobody calls {one.path}"
    for name in ("_initial_epoch", "_learning_rate"):
        assert re.search(rf"\.{name}\b", texts), name


def test_replacements_are_in_place_once_installed():
    from raytf.parallel import trainer

    trainer.install()
    for one in patching.replacements():
        assert getattr(one.owner, one.name).__code__ is patching.replacing(None, one.function).__code__, one.path


def test_all_listed_replacements_are_installed_with_the_trainer():
    from raytf.parallel import trainer

    folder = pathlib.Path(trainer.__file__).parent
    replacing = {f"raytf.parallel.{path.stem}" for path in folder.glob("*.py") if "\n@patch(" in path.read_text()}
    assert {module.__name__ for module in (trainer, *trainer.REPLACING)} == replacing


def test_installed_versions_are_in_the_table():
    assert versions.untested_versions() == {}


def test_what_is_not_as_it_was_is_seen(monkeypatch):
    gone = names.Name("keras.src.layers.layer:Layer._gone", "for a test", "here")
    moved = names.Name("keras.src.gone:Layer", "for a test", "here")
    assert [one.partition(" ")[0] for one in names.unresolved([gone, moved])] == [gone.path, moved.path]
    path = "keras.src.layers.layer:Layer._flatten_layers"
    monkeypatch.setitem(signatures.SIGNATURES, path, ("(self)",))
    (found,) = signatures.changed()
    assert found.startswith(f"{path} has (self, ") and found.endswith("not (self)")


def test_an_import_that_another_version_has_elsewhere_is_explained(monkeypatch):
    with pytest.raises(ImportError) as caught:
        from keras.src.layers.layer import Gone  # noqa: F401
    versions.explain_import_error(caught.value)  # of a version that is tested nothing is known
    monkeypatch.setitem(versions.TESTED, "keras", ("3.11",))
    with pytest.raises(UnsupportedVersionError, match=r"tested with .*keras 3.11.*does not fit keras 3\.\d+.*'Gone'"):
        versions.explain_import_error(caught.value)
    versions.explain_import_error(ImportError("of the user's", name="user.module"))
    versions.explain_import_error(ImportError("not installed", name="keras"))
