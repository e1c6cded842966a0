"""What distinguishes one run from another: the same in every process, and what differs is named."""

from __future__ import annotations

import json
import pathlib

import pytest

from raytf.errors import ConfigError
from raytf.identity import same_run
from tests.unit import kinds_of_models as kinds
from tests.unit.kinds_of_models import told

# Identities of some models in version 2.
OLD = pathlib.Path(__file__).parent / "checkpoints" / "identities_2.json"


def run_of(model, **changes):
    """The identity of a run of a model."""
    whole = {
        "version": same_run.VERSION,
        **model,
        "columns": {"features": ["x"], "labels": "y", "sample_weights": None, "types": {"x": "float", "y": "int64"}},
        "map": None,
        "seed": 0,
        "batch_size": 32,
        "order": {"shuffle": "auto", "used": "full", "window": 65_536},
        "data": {"train": {"rows": 97, "sources": [{"content": "abc"}], "operations": []}},
    }
    return json.loads(json.dumps(whole | changes))


def texts(was, now):
    return [(d.text, d.refused) for d in same_run.find_differences(was, now)]


@pytest.fixture(scope="module")
def base():
    return told(kinds.functional)


MODELS = {
    "activation": ({"activation": "tanh"}, [("Dense (layer 1) activation tanh, was relu", True)]),
    "learning rate": ({"rate": 0.1}, [("learning_rate 0.1, was 0.01", False)]),
    "sgd": ({"optimizer": "sgd"}, [("optimizer SGD, was Adam", True)]),
    "nadam": ({"optimizer": "nadam", "rate": 0.1}, [("optimizer Nadam, was Adam", True)]),
    "adamax": ({"optimizer": "adamax"}, [("optimizer Adamax, was Adam", True)]),
    "dropout": ({"dropout": 0.2}, [("Dropout (layer 3) rate 0.2, was 0.1", False)]),
}


@pytest.mark.parametrize("case", MODELS)
def test_what_differs_in_a_model_is_named(base, case):
    changes, expected = MODELS[case]
    found = texts(run_of(base), run_of(told(kinds.functional, **changes)))
    for difference in expected:
        assert any(text == difference[0] and refused == difference[1] for text, refused in found), found
    assert any(refused for _, refused in found) == any(refused for _, refused in expected)


def test_another_width_and_other_layers_are_named(base):
    assert ("Dense (layer 1) units 8, was 4", True) in texts(run_of(base), run_of(told(kinds.functional, units=8)))
    ((text, refused), *_) = texts(run_of(base), run_of(told(kinds.sequential)))
    assert refused and text.startswith("a model of class Sequential, was Functional")


def test_slots_and_schedules_of_one_class_of_optimizer():
    import keras

    def adam(**arguments):
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(**arguments), "mse")
        return model

    one = run_of(told(adam))
    assert texts(one, run_of(told(adam, amsgrad=True))) == [("amsgrad True, was False", True)]
    assert texts(one, run_of(told(adam, clipnorm=1.0))) == [("clipnorm 1, was None", False)]
    rate = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    (found,) = texts(one, run_of(told(adam, learning_rate=rate)))
    assert found[1] and found[0].startswith("learning_rate ExponentialDecay(") and found[0].endswith("was 0.001")
    before, after = (run_of(told(kinds.known_schedule, rate=rate)) for rate in (0.1, 0.2))
    assert texts(before, after) == [("learning_rate initial_learning_rate 0.2, was 0.1", False)]
    assert same_run.rates_differ(before, after) and not same_run.rates_differ(before, before)
    assert not same_run.rates_differ({}, after)


def test_several_optimizers_are_named_as_their_user_knows_them():
    was, now = ({"_tracked.first": {}, name: {}} for name in ("optimizer", "_tracked.second"))
    (found,) = same_run._optimizers(was, now, both_only=False, slots=True)
    assert found.text == "optimizers [first, second], was [first, optimizer]"


def test_a_subclassed_model_is_known_by_its_layers_and_its_code():
    was = run_of(told(kinds.subclassed))
    assert texts(was, run_of(told(kinds.subclassed, config={"units": 4, "epochs": 9, "patience": 3}))) == []
    other = run_of(told(kinds.subclassed, config={"units": 4, "activation": "tanh"}))
    assert texts(was, other) == [("Dense (layer 1) activation tanh, was relu", True)]


def test_a_loss_is_known_by_its_code():
    was, now = (run_of(told(kinds.own_losses, power=power)) for power in (2, 4))
    assert ("loss u power 4, was 2", False) in texts(was, now)


SOFT = {
    "seed": ({"seed": 1}, ["seed 1, was 0"]),
    "batch": ({"batch_size": 64}, ["batch_size 64, was 32"]),
    "where rows are kept": ({"order": {"shuffle": "auto", "used": "window", "window": 9}}, []),
    "named as it was": ({"order": {"shuffle": "full", "used": "full", "window": 9}}, []),
    "shuffle": ({"order": {"shuffle": "none", "used": "none", "window": 9}}, ["shuffle none, was full"]),
    "rows": (
        {"data": {"train": {"rows": 1200, "sources": [{"content": "x"}], "operations": []}}},
        ["datasets['train'] of 1,200 rows, was 97"],
    ),
    "contents": (
        {"data": {"train": {"rows": 97, "sources": [{"content": "x"}], "operations": []}}},
        ["other contents of datasets['train']"],
    ),
    "validation": (
        {"data": {n: {"rows": 97, "sources": [{"content": "abc"}], "operations": []} for n in ("train", "validation")}},
        ["a new datasets['validation']"],
    ),
    "map": ({"map": {"function": "augment", "code": "3.11 ab"}}, ["map augment, was None"]),
}


@pytest.mark.parametrize("case", SOFT)
def test_differences_outside_the_model_are_named(base, case):
    changes, expected = SOFT[case]
    assert texts(run_of(base), run_of(base, **changes)) == [(text, False) for text in expected]


def test_classes_are_compared_where_both_runs_name_them(base):
    was = run_of(base, classes={"label": ["cat", "dog"]})
    assert texts(was, run_of(base)) == texts(run_of(base), was) == [], "an earlier version did not store them"
    (found,) = texts(was, run_of(base, classes={"label": ["bird", "cat", "dog"]}))
    assert found == ("classes of label [bird, cat, dog], was [cat, dog]", False)


def test_another_python_and_another_keras_are_not_differences(base):
    was = run_of(base, map={"function": "f", "code": "3.11 ab"})
    assert texts(was, run_of(base, map={"function": "f", "code": "3.12 cd"})) == []
    newer = run_of(base | {"keras": "9.9"})
    newer["optimizers"]["optimizer"]["config"]["new"] = True
    newer["model"]["layers"][2]["config"]["new"] = 1
    assert texts(run_of(base), newer) == []


def test_what_is_refused_and_its_message(base):
    was, rate = run_of(base), run_of(told(kinds.functional, rate=0.1))
    with pytest.raises(ConfigError, match=r"if it is the same run; received: 'it' with learning_rate 0\.1, was 0\.01"):
        same_run.check_same_run(was, rate, "auto", "it")
    with pytest.warns(UserWarning, match=r"^it: resumes with learning_rate 0\.1, was 0\.01$"):
        same_run.check_same_run(was, rate, True, "it")
    for resume in ("auto", True):
        with pytest.raises(ConfigError, match="with the model and the optimizer .* optimizer SGD, was Adam"):
            same_run.check_same_run(was, run_of(told(kinds.functional, optimizer="sgd")), resume, "it")


@pytest.mark.parametrize("build", [kinds.functional, kinds.mixed_precision, kinds.own_losses])
def test_a_checkpoint_of_an_earlier_version_is_compared_by_what_both_have(build):
    was = run_of(json.loads(OLD.read_text())[build.__name__], version=2, map={"function": "f", "code": "3.11 ab"})
    was["data"]["train"]["sources"] = [{"content": "another hash"}]
    now = run_of(told(build), map={"function": "f", "code": "3.11 cd"})
    with pytest.warns(UserWarning, match="it: its checkpoints are of another version of raytf"):
        same_run.check_same_run(was, now, "auto", "it")
    assert not same_run.rates_differ(was, now)
    with pytest.warns(UserWarning), pytest.raises(ConfigError, match="received: 'it' with seed 1, was 0"):
        same_run.check_same_run(was, now | {"seed": 1}, "auto", "it")
    with pytest.warns(UserWarning), pytest.raises(ConfigError, match="with the model and the optimizer"):
        same_run.check_same_run(was, run_of(told(kinds.sequential)), True, "it")


def test_checkpoint_without_an_identity_is_resumed(base):
    with pytest.warns(UserWarning, match="of another version of raytf"):
        same_run.check_same_run({}, run_of(base), "auto", "it")
