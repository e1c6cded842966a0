"""Keys of a config that nothing reads are found, however the others are read; what may read all finds none."""

import collections
import copy
import dataclasses
import functools
import json
import operator
import pickle
import sys
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


def of(*functions, config=CONFIG):
    """Keys that nothing reads where the first function builds a model and the others make callbacks."""
    noted = config_keys.AccessTrackingConfig(config)
    references = sys.getrefcount(noted)
    model = functions[0](noted)
    found = config_keys.unread_keys(config, noted, [lambda config: None, *functions[1:]], references)
    del model
    return list(found)


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
    noted = config_keys.AccessTrackingConfig(CONFIG)
    assert noted == CONFIG and dict(noted) == {**noted} == CONFIG and isinstance(noted, dict)
    assert pickle.loads(pickle.dumps(noted)) == CONFIG and type(copy.deepcopy(noted)) is dict
    with pytest.raises(KeyError):
        noted["learning_rat"]


def test_callbacks_are_asked_for_what_the_model_does_not_read():
    called, key = [], "ra" + "te"
    both = (lambda config: config["units"], lambda config: called.append(config[key]))
    assert of(*both) == [] and called == [0.1]
    assert of(lambda config: (config["units"], config["rate"]), lambda config: called.append(1)) == []
    assert called == [0.1], "nothing was left to ask for"
    assert of(lambda config: config["units"], lambda config: called.append(config["rate"])) == []
    assert called == [0.1], "what its source mentions need not be called: it may begin a run of a tracker"


def test_the_key_that_may_be_meant():
    config = {"epoch": 3, "units": 8, "larning_rate": 0.1, "zzz": 1, "n_epochs": 2, "lr": 0.1}
    noted = config_keys.AccessTrackingConfig(config)
    references = sys.getrefcount(noted)
    noted.get("learning_rate", 0.01), noted["units"]
    found = config_keys.unread_keys(config, noted, [len], references)
    rates = {"larning_rate": "learning_rate", "lr": "learning_rate"}
    assert found == {"epoch": "epochs", "n_epochs": "epochs", "zzz": ""} | rates
    text = config_keys.unread_warning(found)
    assert "config['epoch'] (did you mean 'epochs'?)" in text and "config['zzz'] when" in text


def read_elsewhere(config):
    return config["rate"]


class Reader:
    def read(self, config):
        return config["units"]


def test_what_is_read_at_another_time_is_mentioned():
    def build(config, reader=Reader):
        return read_elsewhere(config) if config.get("deep") else reader

    assert {"rate", "deep", "units"} <= config_keys.mentioned_keys(build)
    assert {"rate", "deep"} <= config_keys.mentioned_keys(functools.partial(build, reader=None))
    assert config_keys.mentioned_keys(len) == set()


# ------------------------------------------------------------------------------------------ configs that are read whole

DEFAULTS = {"units": 8, "learning_rate": 0.01}
BATCH = "batch"


def merged(config):
    return ({**DEFAULTS, **config})["units"]


def spread(config):
    return made(**config)


def made(units=8, learning_rate=0.1, **others):
    return units, len


def copied(config):
    return dict(config).setdefault("learning_rate", 0.1)


class Arguments:
    def __init__(self, config):
        vars(self).update(config)

    @property
    def many(self):
        return vars(self)[BATCH]


class Longer(Arguments):
    def lasts(self):
        return self.epoch


class Follows:
    def on_epoch_end(self, epoch, logs):
        return epoch


def namespace(config):
    return Arguments(config).units, DEFAULTS, Follows()


@dataclasses.dataclass
class Settings:
    epoch: int = 1
    lr: float = 0.1
    batch: int = 32


def of_fields(config):
    return Settings(**config)


def of_parameters(config):
    return {"net": net}["net"](**config)


def net(*, epoch, lr, batch):
    return DEFAULTS


def inherited(config):
    return Longer(config).many, "lr", DEFAULTS


@pytest.mark.parametrize("read", [merged, spread, copied, namespace])
def test_a_near_miss_of_a_well_known_key_is_found_though_all_keys_may_be_read(read):
    """For the four ways in which programs take a config as a whole."""
    config = {"epoch": 3, "lr": 0.5, "batch": 64, "units": 8, "zzz": 1}
    noted = config_keys.AccessTrackingConfig(config)
    references = sys.getrefcount(noted)
    model = read(noted)
    found = config_keys.unread_keys(config, noted, [read], references)
    wanted = {"batch": "batch_size", "epoch": "epochs", "lr": "learning_rate"}
    assert found == (wanted if read is not namespace else {"epoch": "epochs", "lr": "learning_rate"}), model


def backwards(config):
    return [config[name[::-1]] for name in ("hcope", "rl", "hctab")], dict(config)


@pytest.mark.parametrize("read", [of_fields, of_parameters, inherited, backwards])
def test_a_key_that_is_read_or_named_is_no_near_miss(read):
    """Of a field, a parameter, a base class, a constant elsewhere, or by a name that is made in the call."""
    config = {"epoch": 3, "lr": 0.5, "batch": 64}
    noted = config_keys.AccessTrackingConfig(config)
    references = sys.getrefcount(noted)
    model = read(noted)
    assert config_keys.unread_keys(config, noted, [read], references) == {}, model
