"""Compares the run of a folder with the requested run. Pure.

An identity is a dict of JSON values that `KerasTrainer` stores with each checkpoint, see `fingerprint.py`. With another
model, optimizer class or slots, the checkpoint's numbers have another meaning: such a run cannot resume. All other
differences are listed, and the user decides.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from raytf.errors import ConfigError
from raytf.logs import warn_user

VERSION = 3
_SHOWN = 6
# Keys of a layer's config that may change in a trained layer: its weights keep their meaning.
_MAY_CHANGE = ("initializer", "regularizer", "constraint", "rate", "dropout", "recurrent_dropout")
# Code and arguments of a user's layer or optimizer: its weights keep their meaning.
_SOFT = ("arguments", "code", "reads")
# Parts that are only hashes, and the text for a difference.
_HASHES = {"code": "another code of {}", "graph": "layers of {} that are connected in another way"}
_MISSING = "nothing"
# The hash of a long value, after its kind.
_HASH = re.compile(r", [0-9a-f]{16}$")


class Difference(NamedTuple):
    """A difference between two runs.

    Args:
        text: "learning_rate 0.1, was 0.01".
        refused: Whether it prevents resuming.
        values: ("0.1", "0.01").
    """

    text: str
    refused: bool
    values: tuple[str, str] = ("", "")


def check_same_run(was: Mapping[str, Any], now: Mapping[str, Any], resume: str | bool, name: str) -> None:
    """Warns of differences, or raises.

    Args:
        was: Identity of the checkpoint; {} if it has none.
        now: Identity of the requested run.
        resume: "auto", or True: resume in spite of differences that allow it.
        name: Name of the run.

    Raises:
        ConfigError: A difference prevents the run from resuming.
    """
    if was.get("version") != now.get("version"):
        warn_user(
            f"{name}: its checkpoints are of another version of raytf. It resumes after a comparison of layers, "
            "weights, optimizer, columns, seed, batch size and number of rows. Check that code and data are the same",
        )
    differences = find_differences(was, now)
    refused = [difference for difference in differences if difference.refused]
    if refused:
        raise ConfigError(
            "A run resumes with the model and the optimizer of its checkpoints",
            f"{name!r} with {describe_differences(refused)}",
            "Use resume=False (--resume false) to start from scratch, or choose another name",
        )
    if not differences:
        return
    if resume == "auto":
        raise ConfigError(
            'With resume="auto" a run resumes if it is the same run',
            f"{name!r} with {describe_differences(differences)}",
            "Use resume=True (--resume true) to resume with what is new, resume=False (--resume false) to start from "
            "scratch, or another name",
        )
    warn_user(f"{name}: resumes with {describe_differences(differences)}")


def describe_differences(differences: list[Difference]) -> str:
    """Returns the differences as a clause, the first few by name; "" if there are none."""
    texts = list(dict.fromkeys(difference.text for difference in differences))
    more = f"; and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return "; ".join(texts[:_SHOWN]) + more


def rates_differ(was: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Returns whether the optimizer of a resumed run has another learning rate; False if unknown."""
    try:
        old_rate, new_rate = (_rate(identity["optimizers"]["optimizer"]) for identity in (was, now))
    except KeyError:
        return False
    return bool(_leaves(old_rate, new_rate, (), was.get("version") != now.get("version")))


def has_one_rate(identity: Mapping[str, Any]) -> bool:
    """Returns whether the model has one optimizer, with a number as learning rate."""
    try:
        rate = _rate(identity["optimizers"]["optimizer"])
    except KeyError:
        return False
    return len(identity["optimizers"]) == 1 and type(rate) in (int, float)


def _rate(optimizer: Mapping[str, Any]) -> Any:
    return _rate(optimizer["inner"]) if "inner" in optimizer else optimizer["config"]["learning_rate"]


def find_differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    """Returns the differences between two identities; those that prevent resuming are first."""
    if was.get("version") != now.get("version"):
        was, now = _in_common(was), _in_common(now)
    # another version of Keras may have keys that this one does not
    both_only = was.get("keras") != now.get("keras")
    differences: list[Difference] = []
    if "model" in was and "model" in now:
        differences += _model(was["model"], now["model"], both_only)
        differences += _optimizers(
            was["optimizers"], now["optimizers"], both_only, not any(d.refused for d in differences)
        )
    whole = {*was, *now} - {"version", "keras", "model", "optimizers", "config", "settings", "order", "data", "classes"}
    for name in sorted(whole if was and now else ()):
        differences += _leaves(was.get(name), now.get(name), (name,), both_only)
    differences += _leaves(was.get("settings", {}), now.get("settings", {}), (), both_only)
    if "order" in was and "order" in now:
        differences += _order(was["order"], now["order"])
    if "classes" in was and "classes" in now:
        differences += _leaves(was["classes"], now["classes"], ("classes of",), both_only)
    if "data" in was and "data" in now:
        for name in sorted({*was["data"], *now["data"]}):
            differences += _data(was["data"].get(name), now["data"].get(name), f"datasets[{name!r}]")
    # values of the config that build_model reads, unless a listed difference has the same values
    named = {d.values for d in differences}
    old_config, new_config = ({f"config[{k!r}]": v for k, v in i.get("config", {}).items()} for i in (was, now))
    differences += [d for d in _leaves(old_config, new_config, (), both_only) if d.values not in named]
    return sorted(differences, key=lambda difference: not difference.refused)


def _in_common(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parts that all versions store in the same way."""
    common = {key: identity[key] for key in ("columns", "seed", "batch_size") if key in identity}
    if "data" in identity:
        common["data"] = {k: {"rows": v["rows"], "sources": [], "operations": []} for k, v in identity["data"].items()}
    if "model" in identity:
        layers = identity["model"]["layers"]
        layers = [{"class": layer["class"]} for layer in layers] if isinstance(layers, list) else []
        common["model"] = {**{key: identity["model"][key] for key in ("class", "weights")}, "layers": layers}
        common["optimizers"] = {k: _plain_optimizer(v) for k, v in identity["optimizers"].items()}
    return common


def _plain_optimizer(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    config = {k: v for k, v in optimizer["config"].items() if isinstance(v, (int, float, type(None)))}
    config = {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in config.items()}
    inner = {"inner": _plain_optimizer(optimizer["inner"])} if "inner" in optimizer else {}
    return {"class": optimizer["class"], "slots": optimizer["slots"], "config": config, **inner}


def _model(was, now, both_only: bool) -> Iterator[Difference]:
    if was["class"] != now["class"]:
        yield _difference(("a model of class",), was["class"], now["class"], True)
        return
    old_layers, new_layers = was["layers"], now["layers"]
    if isinstance(old_layers, str) or isinstance(new_layers, str):  # too many to be listed
        yield from _leaves(old_layers, new_layers, ("the model's layers",), both_only, lambda path: True)
        return
    classes = [[layer["class"] for layer in layers] for layers in (old_layers, new_layers)]
    if classes[0] != classes[1]:
        yield _difference(("the layers",), *classes, True)
        return
    differences, number = [], 0
    for old, new in zip([*old_layers, was], [*new_layers, now], strict=True):
        number += new["class"] != "InputLayer"  # counts like a model's summary
        layer_name = new["class"] if new is now else f"{new['class']} (layer {number})"
        parts = [{k: v for k, v in layer.items() if k not in ("class", "layers", "weights")} for layer in (old, new)]
        if both_only:
            parts = [{k: v for k, v in part.items() if k != "graph"} for part in parts]
        differences += _leaves(*parts, (layer_name,), both_only, _is_of_weights)
    if not any(difference.refused for difference in differences):
        differences += _leaves(was["weights"], now["weights"], ("weights",), both_only, lambda path: True)
    yield from differences


def _is_of_weights(path: tuple[str, ...]) -> bool:
    return not any(part in _SOFT or part.endswith(_MAY_CHANGE) for part in path)


def _optimizers(was, now, both_only: bool, slots: bool) -> Iterator[Difference]:
    """Compares optimizers by the attribute that holds them: a GAN has several."""
    if was.keys() != now.keys():
        yield _difference(("optimizers",), *([_attribute(name) for name in sorted(part)] for part in (was, now)), True)
        return
    for name in now:
        prefix = () if len(now) == 1 else (f"{_attribute(name)}:",)
        yield from _optimizer(was[name], now[name], prefix, both_only, slots)


def _attribute(name: str) -> str:
    """Returns an optimizer's name for the user: a model's tracker may list it under a private attribute."""
    return re.sub(r"^_\w+\.(?=\D)", "", name)


def _optimizer(was, now, path: tuple[str, ...], both_only: bool, slots: bool) -> Iterator[Difference]:
    if was["class"] != now["class"]:
        yield _difference((*path, "optimizer"), was["class"], now["class"], True)
        both_only = True
    slots_differ = slots and was["slots"] != now["slots"] and was["class"] == now["class"]
    changed = _leaves(was["config"], now["config"], path, both_only, lambda path: slots_differ)
    yield from changed
    if was["class"] == now["class"]:
        code_parts = ({key: part[key] for key in ("code", "reads") if key in part} for part in (was, now))
        yield from _leaves(*code_parts, (*path, now["class"]), both_only)
    if slots_differ and not any(difference.refused for difference in changed):
        yield _difference((*path, f"state of the optimizer {now['class']}"), was["slots"], now["slots"], True)
    if "inner" in was and "inner" in now:
        yield from _optimizer(was["inner"], now["inner"], path, both_only, slots)


def _order(was, now) -> list[Difference]:
    """Compares the order of rows: the choice of "auto" follows from the data's location, and is no difference."""
    if was["shuffle"] != now["shuffle"] and was["used"] != now["used"]:
        return _leaves(was["used"], now["used"], ("shuffle",), False)
    both_windows = was["used"] == now["used"] == "window"
    return _leaves(was["window"], now["window"], ("window",), False) if both_windows else []


def _data(was, now, subject: str) -> Iterator[Difference]:
    if was is None or now is None:
        yield Difference(f"{'no ' if now is None else 'a new '}{subject}", False)
        return
    if was["rows"] != now["rows"]:
        yield Difference(f"{subject} of {now['rows']:,} rows, was {was['rows']:,}", False)
    # rows in memory may have come from files, and are not compared with files
    elif was["sources"] != now["sources"] and [set(s) for s in was["sources"]] == [set(s) for s in now["sources"]]:
        yield Difference(f"other contents of {subject}", False)
    if _leaves(was["operations"], now["operations"], (), False):
        yield Difference(f"other operations of {subject}", False)


def _leaves(was, now, path: tuple[str, ...], both_only: bool, refused=lambda path: False) -> list[Difference]:
    """Returns a difference for each value that differs between two nested values.

    Args:
        was, now: JSON values.
        path: Keys that lead to them.
        both_only: Whether to omit keys that only one of two dicts has.
        refused: refused(path) returns whether a difference there prevents resuming.
    """
    if was == now:
        return []
    differences: list[Difference] = []
    if isinstance(was, Mapping) and isinstance(now, Mapping) and was.get("class") == now.get("class"):
        # a user's function counts by its code, not by its name
        skipped = {"function"} if "code" in was and "code" in now else set()
        if skipped and was["code"] != now["code"]:
            skipped.add("reads")
        for key in dict.fromkeys([*was, *now]):
            if key in skipped or (both_only and (key not in was or key not in now)):
                continue
            inner = (*path, key)
            if key in _HASHES:
                differences += _hashes(was.get(key), now.get(key), inner, refused)
            else:
                differences += _leaves(was.get(key, _MISSING), now.get(key, _MISSING), inner, both_only, refused)
    elif isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        for old, new in zip(was, now, strict=True):
            differences += _leaves(old, new, path, both_only, refused)
    else:
        differences.append(_difference(path, was, now, refused(path)))
    return differences


def _hashes(was: str | None, now: str | None, path: tuple[str, ...], refused) -> list[Difference]:
    """Compares hashes; those of code from two versions of Python are not compared."""
    if was == now or (was and now and was.rpartition(" ")[0] != now.rpartition(" ")[0]):
        return []
    return [Difference(_HASHES[path[-1]].format(_location(path[:-1])), refused(path))]


def _location(path: tuple[str, ...]) -> str:
    return " ".join(part for part in path if part not in ("config", "arguments", "reads"))


def _difference(path: tuple[str, ...], was: Any, now: Any, refused: bool) -> Difference:
    values = _value(now), _value(was)
    if values[0] == values[1]:
        values = _value(now, digits=9), _value(was, digits=9)
    same = values[0] == values[1]
    text = f"other values of {_location(path)}" if same else f"{_location(path)} {values[0]}, was {values[1]}"
    return Difference(text, bool(refused), ("", "") if same else (values[0].casefold(), values[1].casefold()))


def _value(value: Any, digits: int = 6) -> str:
    """Returns a value as text, without hashes."""
    if isinstance(value, float):
        return f"{value:.{digits}g}"
    if isinstance(value, Mapping):
        name = value.get("function") or value.get("class")
        hidden = ("function", "class", "code", "reads", "module", "self")
        inner = ", ".join(f"{k}={_value(v, digits)}" for k, v in value.items() if k not in hidden)
        return f"{name}({inner})" if name and inner else str(name) if name else "{" + inner + "}"
    if isinstance(value, list):
        parts = [_value(part, digits) for part in value]
        parts = parts if len(parts) <= 8 else [*parts[:4], f"... {len(parts) - 8} more ...", *parts[-4:]]
        return "[" + ", ".join(parts) + "]"
    return _HASH.sub("", str(value))
