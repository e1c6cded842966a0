"""Keys of a config that a model function always reads are found in its source, before it is called."""

from __future__ import annotations

import contextlib
import functools
import inspect

import pytest

from raytf.identity.required_keys import required_keys


def read_elsewhere(config):
    return config["rate"]


def changes(options):
    depth = options["depth"]
    return depth, options.setdefault("units", 3), options["units"]


class Net:
    def __init__(self, size, config):
        self.size, self.units = size, config["units"]


def plain(config):
    import math

    size = config["size"] * math.pi
    print(config["units"], config.get("a"))
    return [size, config["b"] if size else 1, lambda: config["c"]]


def guarded(config):
    if "size" in config:
        return config["size"]
    return config["other"]


def defaults(config):
    config = {"units": 3, **config}
    return config["units"]


def helped(config):
    size = config["size"]
    rate = read_elsewhere(config)
    return size, rate, Net(3, config=config), config["b"]


def helped_by_what_changes(config):
    return [config["a"], changes(options=config), config["units"]]


def unknown(config):
    size = config["size"]
    pytest.importorskip(config)
    return size, config["units"]


def branches(config):
    layers = [config["size"] for _ in range(config["depth"])]
    for units in config["units"]:
        layers.append(units)
        if "dropout" in config and units:
            layers.append(config["dropout"])
    if config.get("deep"):
        layers.append(dict(config, a=1))

    def block(x):
        return x

    with open(config["file"]) as file:
        rate = config["rate"]
    return file, rate, block, {**config}


def returns_early(config):
    for units in config["units"]:
        if units:
            return units
    return config["rate"]


def suppresses(config):
    with contextlib.suppress(KeyError):
        print(config["units"])
    return config["rate"]


def rebinds(config):
    for _ in range(config["size"]):
        config = {"rate": 1}
    return config["rate"]


def recursive(config):
    return config["size"], recursive(config)


@functools.wraps(plain)
def wrapped(config):
    return plain({"size": 3, "units": 8} | config)


def tried(config):
    try:
        found = config["units"]
    except KeyError:
        found = 3
    return found, config["rate"]


@pytest.mark.parametrize(
    "function, keys",
    [
        (plain, ["size", "units"]),
        (guarded, []),
        (defaults, []),
        (helped, ["size", "rate", "units", "b"]),
        (helped_by_what_changes, ["a", "depth"]),
        (unknown, ["size"]),
        (branches, ["depth", "units", "file", "rate"]),
        (returns_early, ["units"]),
        (suppresses, ["rate"]),
        (rebinds, ["size"]),
        (recursive, ["size"]),
        (tried, ["rate"]),
        (wrapped, []),
    ],
)
def test_keys_that_are_read_whatever_happens(function, keys):
    assert required_keys(len) == {}
    found = required_keys(function)
    assert list(found) == keys
    lines = inspect.getsource(inspect.getmodule(test_keys_that_are_read_whatever_happens)).splitlines()
    for key, place in found.items():
        file, _, line = place.partition(", line ")
        assert file == "test_required_keys.py" and f'["{key}"]' in lines[int(line) - 1]
