"""Every private name is where raytf looks for it, with the signature that is recorded: an upgrade fails here first."""

import ast
import pathlib
import re

import pytest

from raytf.compat import names, patching, selfcheck, signatures, versions
from raytf.errors import UnsupportedVersionError

COMPAT = pathlib.Path(names.__file__).parent
DOORS = ("keras_objects", "ray_configs", "ray_core", "ray_data", "ray_train", "ray_tune", "tensorflow")


@pytest.fixture(scope="module", autouse=True)
def all_imported():
    selfcheck.import_all()


def test_names_resolve():
    found = names.listed()
    assert len(found) > 100
    assert names.unresolved(found) == []


def test_each_says_why():
    assert [name.path for name in names.listed() if len(name.why) < 10] == []
    assert [one.path for one in patching.replacements() if not one.function.__doc__] == []


def test_signatures_are_as_recorded():
    assert signatures.changed() == []


def test_functions_say_what_they_touch():
    """A private attribute in a function of this package is one of its `uses`, or of a name that the module imports."""
    for path in sorted(COMPAT.glob("*.py")):
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
            said = re.findall(r"\w+", " ".join(ast.unparse(d) for d in function.decorator_list))
            for node in ast.walk(function):
                if isinstance(node, ast.Attribute) and re.match("_[a-z]", node.attr):
                    modules = ("_private", "_lock", "_initial_epoch", "_keras_history")  # the last is set on objects
                    assert node.attr in said or node.attr in modules, (
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
    assert len(patching.overridden()) > 15
    for one in patching.overridden():
        assert hasattr(one.owner, one.name), f"{one.path} is gone"
        by_name = rf"\.{one.name}\(|\"{one.name}\"|'{one.name}'"
        assert re.search(by_name, texts), f"nobody calls {one.path}"
    for name in ("_initial_epoch", "_learning_rate"):
        assert re.search(rf"\.{name}\b", texts), name


def test_replacements_stand_in_place_once_installed():
    from raytf.parallel import trainer

    trainer.install()
    for one in patching.replacements():
        assert getattr(one.owner, one.name).__code__ is patching.replacing(None, one.function).__code__, one.path


def test_all_that_say_replacements_come_with_the_trainer():
    from raytf.parallel import trainer

    folder = pathlib.Path(trainer.__file__).parent
    saying = {f"raytf.parallel.{path.stem}" for path in folder.glob("*.py") if "\n@patch(" in path.read_text()}
    assert {module.__name__ for module in (trainer, *trainer.REPLACING)} == saying


def test_installed_versions_are_in_the_table():
    assert versions.untested() == {}


def test_other_versions_are_refused_with_what_does_not_fit(monkeypatch):
    from raytf.parallel import trainer

    trainer.check_versions()
    monkeypatch.setitem(versions.TESTED, "keras", ("3.11",))
    assert set(versions.untested()) == {"keras"}
    assert selfcheck.differences() == []
    assert "keras" in selfcheck.warning()
    gone = names.Name("keras.src.layers.layer:Layer._gone", "for a test", "here")
    monkeypatch.setattr(names, "listed", lambda: [gone])
    monkeypatch.setattr(signatures, "SIGNATURES", {})
    found = selfcheck.differences()
    assert any("Layer._gone" in one for one in found) and any("fit" in one for one in found)
    with pytest.raises(UnsupportedVersionError, match=r"does not fit keras 3\.\d+.*_gone"):
        trainer.check_versions()


@pytest.mark.parametrize(
    ("now", "fits"),
    [
        ("(self, x, y=)", True),
        ("(self, x, y=, new=)", True),
        ("(self, x, *, new=, y=)", True),
        ("(self, x, y=, **more)", True),
        ("(self, x, new, y=)", False),
        ("(self, x)", False),
        ("(self, y=, x)", False),
    ],
)
def test_calls_fit_a_signature_that_only_grew(now, fits):
    assert signatures._fits(now, ("(self, x, y=)",)) is fits
