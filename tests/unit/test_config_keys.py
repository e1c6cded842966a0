"""Keys of a config that nothing reads are found, however the others are read; what may read all finds none."""

import collections
import copy
import json
import operator
import os
import pickle
import types

import pytest

from raytf.identity import config_keys

CONFIG = {"units": 8, "rate": 0.1}


class Net:
    def __init__(self, config):
        self.units = config["units"]


class Keeps:
    def __init__(self, config):
        self.config = config


def of(*functions):
    return config_keys.unread(["units", "rate"], CONFIG, functions)[1]


@pytest.mark.parametrize(
    "read",
    [
        lambda config: config["units"],
        lambda config: config.get("units", 3),
        lambda config: config.pop("units"),
        lambda config: config.setdefault("units", 3),
        lambda config: "units" in config,
        lambda config: Net(config),
        lambda config: operator.itemgetter("units")(config),
        lambda config: collections.ChainMap({}, config)["units"],
        lambda config: [len(config), repr(config), config.update(rate=3), config["units"]],
    ],
)
def test_what_reads_one(read):
    assert of(read) == ["rate"]


@pytest.mark.parametrize(
    "read",
    [
        lambda config: types.SimpleNamespace(**config),
        lambda config: dict(config),
        lambda config: {**config},
        lambda config: config | {},
        lambda config: {} | config,
        lambda config: {"a": 1}.update(config),
        lambda config: [*config],
        lambda config: list(config.items()),
        lambda config: list(config.values()),
        lambda config: config.keys(),
        lambda config: config.copy(),
        lambda config: copy.copy(config),
        lambda config: copy.deepcopy(config),
        lambda config: json.dumps(config),
        lambda config: pickle.dumps(config),
        lambda config: config == {},
        lambda config: config.popitem(),
        lambda config: Keeps(config),
        lambda config: lambda: config["rate"],
    ],
)
def test_what_may_read_all(read):
    assert of(read) == []


def test_values_are_those_of_the_config():
    noted = config_keys.Noted(CONFIG)
    assert noted == CONFIG and dict(noted) == {**noted} == CONFIG and isinstance(noted, dict)
    assert pickle.loads(pickle.dumps(noted)) == CONFIG and type(copy.deepcopy(noted)) is dict
    with pytest.raises(KeyError):
        noted["learning_rat"]


def test_callbacks_are_asked_for_what_the_model_does_not_read():
    called = []
    both = (lambda config: config["units"], lambda config: called.append(config["rate"]))
    assert of(*both) == [] and called == [0.1]
    assert of(lambda config: (config["units"], config["rate"]), lambda config: called.append(1)) == []
    assert called == [0.1], "nothing was left to ask for"


def test_what_a_fork_tells():
    def fork(build):
        child = os.fork()
        if child == 0:
            build(CONFIG)
            os._exit(0)
        return os.waitpid(child, 0)[1]

    names = ("units", "rate", "unit")
    assert config_keys.ask(fork, config_keys.Noting(lambda c: c["units"], None, names)) == (0, ["rate", "unit"])
    assert config_keys.ask(fork, config_keys.Noting(lambda c: c["units"], lambda c: c["nothing"], names)) == (0, [])
    assert config_keys.ask(fork, lambda config: None) == (0, [])
