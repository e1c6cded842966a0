"""Whether the run that a folder holds is the run that is asked for, and what differs. Pure.

An identity is a dict of JSON values that `KerasTrainer` puts beside each checkpoint, see `fingerprint.py`. Differences
of the model and of the optimizer's class and slots mean that the checkpoint's numbers stand for something else: such a
run is not gone on with. All others are named, and the user says what is to happen.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from raytf.errors import ConfigError

VERSION = 3
_SHOWN = 6
# Keys of a layer's config that a trained layer may have changed: its weights mean the same.
_MAY_CHANGE = ("initializer", "regularizer", "constraint", "rate", "dropout", "recurrent_dropout")
# Of a layer or an optimizer: what the user's class computes, and was made with; its weights mean the same.
_SOFT = ("arguments", "code", "reads")
# Parts that are hashes alone, and how another one is told.
_HASHES = {"code": "another code of {}", "graph": "layers of {} that are connected in another way"}
_MISSING = "nothing"
# That of a long value, after its kind.
_HASH = re.compile(r", [0-9a-f]{16}$")


class Difference(NamedTuple):
    """What differs between two runs.

    Args:
        text: "learning_rate 0.1, was 0.01".
        refused: whether no run goes on with it.
        values: ("0.1", "0.01").
    """

    text: str
    refused: bool
    values: tuple[str, str] = ("", "")


def check(was: Mapping[str, Any], now: Mapping[str, Any], resume: str | bool, name: str) -> None:
    """Warns of what differs, or refuses it.

    Args:
        was: the identity of the checkpoint; {} where it has none.
        now: that of the run that is asked for.
        resume: "auto", or True: go on nevertheless, where that has a meaning.
        name: of the run.

    Raises:
        ConfigError: something differs, and the run does not go on with it.
    """
    if was.get("version") != now.get("version"):
        warnings.warn(
            f"{name}: its checkpoints are of another version of raytf; what both note is compared with the run that is "
            "asked for: layers, weights, optimizer, columns, seed, batch size and number of rows",
            stacklevel=3,
        )
    found = compare(was, now)
    refused = [difference for difference in found if difference.refused]
    if refused:
        raise ConfigError(
            "A run resumes with the model and the optimizer of its checkpoints",
            f"{name!r} with {shown(refused)}",
            "Use resume=False to start from scratch, or choose another name",
        )
    if not found:
        return
    if resume == "auto":
        raise ConfigError(
            'With resume="auto" a run resumes if it is the same run',
            f"{name!r} with {shown(found)}",
            "Use resume=True (--resume true) to resume with what is new, resume=False to start from scratch, or "
            "another name",
        )
    warnings.warn(f"{name}: resumes with {shown(found)}", stacklevel=3)


def shown(found: list[Difference]) -> str:
    """The differences as a clause, the first few of them by name; "" if there are none."""
    texts = list(dict.fromkeys(difference.text for difference in found))
    more = f"; and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return "; ".join(texts[:_SHOWN]) + more


def rates_differ(was: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether the optimizer of a run that goes on was given another learning rate; False where that is not known."""
    try:
        before, after = (_rate(identity["optimizers"]["optimizer"]) for identity in (was, now))
    except KeyError:
        return False
    return bool(_leaves(before, after, (), was.get("version") != now.get("version")))


def has_one_rate(identity: Mapping[str, Any]) -> bool:
    """Whether the model has one optimizer, with a number for its learning rate."""
    try:
        rate = _rate(identity["optimizers"]["optimizer"])
    except KeyError:
        return False
    return len(identity["optimizers"]) == 1 and type(rate) in (int, float)


def _rate(optimizer: Mapping[str, Any]) -> Any:
    return _rate(optimizer["inner"]) if "inner" in optimizer else optimizer["config"]["learning_rate"]


def compare(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    """The differences between two identities, those that are refused first."""
    if was.get("version") != now.get("version"):
        was, now = _in_common(was), _in_common(now)
    # another version of Keras may know keys that this one does not
    both_only = was.get("keras") != now.get("keras")
    found: list[Difference] = []
    if "model" in was and "model" in now:
        found += _model(was["model"], now["model"], both_only)
        found += _optimizers(was["optimizers"], now["optimizers"], both_only, not any(d.refused for d in found))
    whole = {*was, *now} - {"version", "keras", "model", "optimizers", "config", "settings", "order", "data"}
    for name in sorted(whole if was and now else ()):
        found += _leaves(was.get(name), now.get(name), (name,), both_only)
    found += _leaves(was.get("settings", {}), now.get("settings", {}), (), both_only)
    if "order" in was and "order" in now:
        found += _order(was["order"], now["order"])
    if "data" in was and "data" in now:
        for name in sorted({*was["data"], *now["data"]}):
            found += _data(was["data"].get(name), now["data"].get(name), f"datasets[{name!r}]")
    # values of the config that build_model reads, unless what they changed is named already
    named = {d.values for d in found}
    before, after = ({f"config[{k!r}]": v for k, v in i.get("config", {}).items()} for i in (was, now))
    found += [d for d in _leaves(before, after, (), both_only) if d.values not in named]
    return sorted(found, key=lambda difference: not difference.refused)


def _in_common(identity: Mapping[str, Any]) -> dict[str, Any]:
    """What each version has said in the same way."""
    found = {key: identity[key] for key in ("columns", "seed", "batch_size") if key in identity}
    if "data" in identity:
        found["data"] = {k: {"rows": v["rows"], "sources": [], "operations": []} for k, v in identity["data"].items()}
    if "model" in identity:
        layers = identity["model"]["layers"]
        layers = [{"class": layer["class"]} for layer in layers] if isinstance(layers, list) else []
        found["model"] = {**{key: identity["model"][key] for key in ("class", "weights")}, "layers": layers}
        found["optimizers"] = {k: _plain_optimizer(v) for k, v in identity["optimizers"].items()}
    return found


def _plain_optimizer(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    config = {k: v for k, v in optimizer["config"].items() if isinstance(v, (int, float, type(None)))}
    config = {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in config.items()}
    inner = {"inner": _plain_optimizer(optimizer["inner"])} if "inner" in optimizer else {}
    return {"class": optimizer["class"], "slots": optimizer["slots"], "config": config, **inner}


def _model(was, now, both_only: bool) -> Iterator[Difference]:
    if was["class"] != now["class"]:
        yield _difference(("a model of class",), was["class"], now["class"], True)
        return
    before, after = was["layers"], now["layers"]
    if isinstance(before, str) or isinstance(after, str):  # too many to be listed
        yield from _leaves(before, after, ("the model's layers",), both_only, lambda path: True)
        return
    classes = [[layer["class"] for layer in layers] for layers in (before, after)]
    if classes[0] != classes[1]:
        yield _difference(("the layers",), *classes, True)
        return
    found, number = [], 0
    for old, new in zip([*before, was], [*after, now], strict=True):
        number += new["class"] != "InputLayer"  # as a model's summary counts
        what = new["class"] if new is now else f"{new['class']} (layer {number})"
        parts = [{k: v for k, v in layer.items() if k not in ("class", "layers", "weights")} for layer in (old, new)]
        if both_only:
            parts = [{k: v for k, v in part.items() if k != "graph"} for part in parts]
        found += _leaves(*parts, (what,), both_only, _is_of_weights)
    if not any(difference.refused for difference in found):
        found += _leaves(was["weights"], now["weights"], ("weights",), both_only, lambda path: True)
    yield from found


def _is_of_weights(path: tuple[str, ...]) -> bool:
    return not any(part in _SOFT or part.endswith(_MAY_CHANGE) for part in path)


def _optimizers(was, now, both_only: bool, slots: bool) -> Iterator[Difference]:
    """By the attribute that holds them: a GAN has several."""
    if was.keys() != now.keys():
        yield _difference(("optimizers",), *([_attribute(name) for name in sorted(its)] for its in (was, now)), True)
        return
    for name in now:
        before = () if len(now) == 1 else (f"{_attribute(name)}:",)
        yield from _optimizer(was[name], now[name], before, both_only, slots)


def _attribute(name: str) -> str:
    """The name of an optimizer as its user knows it: what a model tracks may be listed in a private attribute."""
    return re.sub(r"^_\w+\.(?=\D)", "", name)


def _optimizer(was, now, path: tuple[str, ...], both_only: bool, slots: bool) -> Iterator[Difference]:
    if was["class"] != now["class"]:
        yield _difference((*path, "optimizer"), was["class"], now["class"], True)
        both_only = True
    others = slots and was["slots"] != now["slots"] and was["class"] == now["class"]
    changed = _leaves(was["config"], now["config"], path, both_only, lambda path: others)
    yield from changed
    if was["class"] == now["class"]:
        own = ({key: its[key] for key in ("code", "reads") if key in its} for its in (was, now))
        yield from _leaves(*own, (*path, now["class"]), both_only)
    if others and not any(difference.refused for difference in changed):
        yield _difference((*path, f"state of the optimizer {now['class']}"), was["slots"], now["slots"], True)
    if "inner" in was and "inner" in now:
        yield from _optimizer(was["inner"], now["inner"], path, both_only, slots)


def _order(was, now) -> list[Difference]:
    """The order of rows: what "auto" stands for follows from where the data is kept, which is no difference."""
    if was["shuffle"] != now["shuffle"] and was["used"] != now["used"]:
        return _leaves(was["used"], now["used"], ("shuffle",), False)
    both = was["used"] == now["used"] == "window"
    return _leaves(was["window"], now["window"], ("window",), False) if both else []


def _data(was, now, what: str) -> Iterator[Difference]:
    if was is None or now is None:
        yield Difference(f"{'no ' if now is None else 'a new '}{what}", False)
        return
    if was["rows"] != now["rows"]:
        yield Difference(f"{what} of {now['rows']:,} rows, was {was['rows']:,}", False)
    # rows that come from memory may have come from files, and are not compared with these
    elif was["sources"] != now["sources"] and [set(s) for s in was["sources"]] == [set(s) for s in now["sources"]]:
        yield Difference(f"other contents of {what}", False)
    if _leaves(was["operations"], now["operations"], (), False):
        yield Difference(f"other operations of {what}", False)


def _leaves(was, now, path: tuple[str, ...], both_only: bool, refused=lambda path: False) -> list[Difference]:
    """A difference for each value in which two nested ones differ.

    Args:
        was, now: JSON.
        path: keys on the way to them.
        both_only: leave out keys that only one of two dicts has.
        refused: refused(path) of a value.
    """
    if was == now:
        return []
    found: list[Difference] = []
    if isinstance(was, Mapping) and isinstance(now, Mapping) and was.get("class") == now.get("class"):
        # a function of the user's is told by its code, whatever its name
        skipped = {"function"} if "code" in was and "code" in now else set()
        if skipped and was["code"] != now["code"]:
            skipped.add("reads")
        for key in dict.fromkeys([*was, *now]):
            if key in skipped or (both_only and (key not in was or key not in now)):
                continue
            inner = (*path, key)
            if key in _HASHES:
                found += _hashes(was.get(key), now.get(key), inner, refused)
            else:
                found += _leaves(was.get(key, _MISSING), now.get(key, _MISSING), inner, both_only, refused)
    elif isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        for before, after in zip(was, now, strict=True):
            found += _leaves(before, after, path, both_only, refused)
    else:
        found.append(_difference(path, was, now, refused(path)))
    return found


def _hashes(was: str | None, now: str | None, path: tuple[str, ...], refused) -> list[Difference]:
    """Of code, that of two versions of Python is not compared."""
    if was == now or (was and now and was.rpartition(" ")[0] != now.rpartition(" ")[0]):
        return []
    return [Difference(_HASHES[path[-1]].format(_place(path[:-1])), refused(path))]


def _place(path: tuple[str, ...]) -> str:
    return " ".join(part for part in path if part not in ("config", "arguments", "reads"))


def _difference(path: tuple[str, ...], was: Any, now: Any, refused: bool) -> Difference:
    values = _value(now), _value(was)
    if values[0] == values[1]:
        values = _value(now, digits=9), _value(was, digits=9)
    same = values[0] == values[1]
    text = f"other values of {_place(path)}" if same else f"{_place(path)} {values[0]}, was {values[1]}"
    return Difference(text, bool(refused), ("", "") if same else (values[0].casefold(), values[1].casefold()))


def _value(value: Any, digits: int = 6) -> str:
    """A value as it is shown; hashes are not."""
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
