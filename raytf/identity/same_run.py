"""Whether the run that a folder holds is the run that is asked for, and what differs. Pure.

An identity is a dict of JSON values that `KerasTrainer` puts beside each checkpoint, see `fingerprint.py`. Differences
of the model and of the optimizer's class and slots mean that the checkpoint's numbers stand for something else: such a
run is not gone on with. All others are named, and the user says what is to happen.
"""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from raytf.errors import ConfigError

VERSION = 2
# Of version 1, hashes and code were described in another way; these are compared by what both have.
_OLDEST = 1
_SHOWN = 6
# Keys of a layer's config that a trained layer may have changed: its weights mean the same.
_MAY_CHANGE = ("initializer", "regularizer", "constraint", "rate", "dropout", "recurrent_dropout")
_MISSING = "nothing"
# That of a long value, after its kind.
_HASH = re.compile(r", [0-9a-f]{16}$")


@dataclasses.dataclass(frozen=True)
class Difference:
    """What differs between two runs.

    Args:
        text: "learning_rate 0.1, was 0.01".
        refused: whether no run goes on with it.
    """

    text: str
    refused: bool


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
    if was.get("version") == _OLDEST:
        warnings.warn(
            f"{name}: its checkpoints are of an earlier version of raytf, which did not note all of a model's code and "
            "values, nor all rows of data in memory; these are not compared with the run that is asked for",
            stacklevel=3,
        )
    elif was.get("version") != VERSION:
        warnings.warn(
            f"{name}: its checkpoints do not say of which model, optimizer, columns and data they are, so that it "
            "cannot be compared with the run that is asked for; it resumes",
            stacklevel=3,
        )
        return
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
    if _OLDEST in (was.get("version"), now.get("version")):
        before, after = _as_of_old(before), _as_of_old(after)
    return before != after


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
    old = _OLDEST in (was.get("version"), now.get("version"))
    if old:
        was, now = _as_of_old(was), _as_of_old(now)
    # another version of Keras may know keys that this one does not
    both_only = old or was.get("keras") != now.get("keras")
    model = list(_model(was["model"], now["model"], both_only))
    optimizer = list(_optimizers(was["optimizers"], now["optimizers"], both_only, not any(d.refused for d in model)))
    rest = []
    for name in ("loss", "loss_weights", "metrics", "weighted_metrics", "columns", "map", "seed", "batch_size"):
        rest += _soft(was.get(name), now.get(name), name, both_only)
    if "config" in was and "config" in now:
        rest += _config(was["config"], now["config"], [*model, *optimizer, *rest])
    if "settings" in was and "settings" in now:
        rest += _soft(was["settings"], now["settings"], "", both_only)
    rest += _order(was["order"], now["order"])
    for name in sorted({*was["data"], *now["data"]}):
        rest += _data(was["data"].get(name), now["data"].get(name), name)
    return sorted([*model, *optimizer, *rest], key=lambda difference: not difference.refused)


def _as_of_old(identity: Any) -> Any:
    """An identity without what version 1 described in another way: code, hashes, and numbers after six digits."""
    if isinstance(identity, Mapping):
        by_code = "code" in identity
        left_out = ("code", "reads", "attributes", "values", "content", "graph", "module") + ("function",) * by_code
        return {k: _as_of_old(v) for k, v in identity.items() if k not in left_out}
    if isinstance(identity, list):
        return [_as_of_old(part) for part in identity]
    if isinstance(identity, float):
        return float(f"{identity:.6g}")
    return _HASH.sub("", identity) if isinstance(identity, str) else identity


def _config(was: Mapping, now: Mapping, others: list[Difference]) -> Iterator[Difference]:
    """Values of the config that build_model reads, unless what they changed in the model is named already."""
    named = [_change(difference.text) for difference in others]
    for key in sorted({*was, *now}):
        before, after = was.get(key, _MISSING), now.get(key, _MISSING)
        for difference in _leaves(before, after, f"config[{key!r}]", False, lambda path: False):
            pair = _change(difference.text)
            if not any(all(a in (b, _MISSING) for a, b in zip(pair, other, strict=True)) for other in named):
                yield difference


def _change(text: str) -> tuple[str, str]:
    """("0.1", "0.01") of a difference's text that ends with "0.1, was 0.01"."""
    now, _, was = text.casefold().rpartition(", was ")
    return now.rpartition(" ")[2], was


def _model(was, now, both_only: bool) -> Iterator[Difference]:
    if was["class"] != now["class"]:
        yield Difference(f"a model of class {now['class']}, was {was['class']}", True)
    before, after = was["layers"], now["layers"]
    if isinstance(before, str) or isinstance(after, str):  # too many to be listed
        if before != after:
            yield Difference(f"the model's layers ({after}, was {before})", True)
        return
    classes = [[layer["class"] for layer in layers] for layers in (before, after)]
    refused = False
    if classes[0] != classes[1]:
        yield Difference(f"the layers {_listed(classes[1])}, was {_listed(classes[0])}", True)
        return
    number = 0
    for old, new in zip(before, after, strict=True):
        number += new["class"] != "InputLayer"  # as a model's summary counts
        for difference in _layer(old, new, f"{new['class']} (layer {number})", both_only):
            refused |= difference.refused
            yield difference
    for difference in _layer(was, now, now["class"], both_only):
        refused |= difference.refused
        yield difference
    if refused:
        return
    if was["weights"] != now["weights"]:
        yield from _leaves(was["weights"], now["weights"], "weights", both_only, lambda path: True)
    elif was.get("graph") != now.get("graph") and not both_only:
        yield Difference("layers that are connected in another way", True)


def _layer(was, now, what: str, both_only: bool) -> Iterator[Difference]:
    def refused(path: tuple[str, ...]) -> bool:
        return not any(part.endswith(_MAY_CHANGE) for part in path)

    if both_only or was.get("graph") == now.get("graph") or what == now.get("class"):
        pass
    else:
        yield Difference(f"layers of {what} that are connected in another way", True)
    yield from _leaves(was.get("config") or {}, now.get("config") or {}, what, both_only, refused)
    for part in ("arguments", "attributes", "values"):
        yield from _soft(was.get(part) or {}, now.get(part) or {}, what, both_only)
    yield from _code(was, now, what)


def _code(was, now, what: str, path: tuple[str, ...] = ()) -> Iterator[Difference]:
    """The code of a function or a class, and the values that it reads: a run can go on with others."""
    if _codes_differ(was.get("code"), now.get("code")):
        names = {part.get("function") or "<lambda>" for part in (was, now)} - {"<lambda>"}
        name = f" {now['function']!r}" if names and now.get("function") in names else ""
        yield Difference(f"another code of {' '.join((what, *path))}{name}", False)
    elif was.get("code") == now.get("code"):  # of one version of Python
        yield from _leaves(was.get("reads") or {}, now.get("reads") or {}, what, False, lambda path: False, path)


def _optimizers(was, now, both_only: bool, slots: bool) -> Iterator[Difference]:
    """By the attribute that holds them: a GAN has several."""
    if was.keys() != now.keys():
        yield Difference(f"optimizers {_listed(_attributes(now))}, was {_listed(_attributes(was))}", True)
        return
    for name in now:
        for difference in _optimizer(was[name], now[name], both_only, slots):
            text = difference.text if len(now) == 1 else f"{_attributes([name])[0]}: {difference.text}"
            yield dataclasses.replace(difference, text=text)


def _attributes(names: Iterable[str]) -> list[str]:
    """The names of optimizers as their user knows them: what a model tracks may be listed in a private attribute."""
    return sorted(re.sub(r"^_\w+\.(?=\D)", "", name) for name in names)


def _optimizer(was, now, both_only: bool, slots: bool) -> Iterator[Difference]:
    if was["class"] != now["class"]:
        yield Difference(f"optimizer {now['class']}, was {was['class']}", True)
        rates = [part["config"].get("learning_rate", _MISSING) for part in (was, now)]
        if rates[0] != rates[1] and _MISSING not in rates:
            yield from _leaves(rates[0], rates[1], "learning_rate", both_only, lambda path: False)
        return
    others = slots and was["slots"] != now["slots"]
    changed = []
    for key in dict.fromkeys([*was["config"], *now["config"]]):
        before, after = was["config"].get(key, _MISSING), now["config"].get(key, _MISSING)
        if both_only and _MISSING in (before, after):
            continue
        changed += _leaves(before, after, key, both_only, lambda path: others)
    yield from changed
    if others and not any(difference.refused for difference in changed):
        yield Difference(f"other state of the optimizer {now['class']} ({now['slots']}, was {was['slots']})", True)
    yield from _soft(was.get("attributes") or {}, now.get("attributes") or {}, now["class"], both_only)
    yield from _code(was, now, now["class"])
    if "inner" in was and "inner" in now:
        yield from _optimizer(was["inner"], now["inner"], both_only, slots)


def _order(was, now) -> Iterator[Difference]:
    """The order of rows: what "auto" stands for follows from where the data is kept, which is no difference."""
    if was["shuffle"] != now["shuffle"] and was["used"] != now["used"]:
        yield Difference(f"shuffle {_value(now['used'])}, was {_value(was['used'])}", False)
    elif was["used"] == now["used"] == "window" and was["window"] != now["window"]:
        yield Difference(f"window {_value(now['window'])}, was {_value(was['window'])}", False)


def _data(was, now, name: str) -> Iterator[Difference]:
    what = f"datasets[{name!r}]"
    if was is None or now is None:
        yield Difference(f"{'no ' if now is None else 'a new '}{what}", False)
        return
    if was["rows"] != now["rows"]:
        yield Difference(f"{what} of {now['rows']:,} rows, was {was['rows']:,}", False)
    # rows that come from memory may have come from files, and are not compared with these
    elif was["sources"] != now["sources"] and [set(s) for s in was["sources"]] == [set(s) for s in now["sources"]]:
        yield Difference(f"other contents of {what}", False)
    if list(_leaves(was["operations"], now["operations"], what, False, lambda path: False)):
        yield Difference(f"other operations of {what}", False)


def _soft(was, now, what: str, both_only: bool) -> Iterator[Difference]:
    return _leaves(was, now, what, both_only, lambda path: False)


def _leaves(was, now, what: str, both_only: bool, refused, path: tuple[str, ...] = ()) -> Iterator[Difference]:
    """A difference for each value in which two nested ones differ.

    Args:
        was, now: JSON.
        what: to begin each text with.
        both_only: leave out keys that only one of two dicts has.
        refused: refused(keys on the way to the value).
    """
    if was == now:
        return
    if isinstance(was, Mapping) and isinstance(now, Mapping) and was.get("class") == now.get("class"):
        # a function of the user's is told by its code, whatever its name
        by_code = "code" in was and "code" in now
        if by_code:
            yield from _code(was, now, what, path)
        for key in dict.fromkeys([*was, *now]):
            if (both_only and (key not in was or key not in now)) or (by_code and key in ("function", "code", "reads")):
                continue
            before, after = was.get(key, _MISSING), now.get(key, _MISSING)
            yield from _leaves(before, after, what, both_only, refused, (*path, key))
    elif isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        for before, after in zip(was, now, strict=True):
            yield from _leaves(before, after, what, both_only, refused, path)
    else:
        yield _difference(what, path, now, was, refused)


def _difference(what: str, path: tuple[str, ...], now: Any, was: Any, refused) -> Difference:
    place, shown, before = " ".join(part for part in (what, *path) if part), _value(now), _value(was)
    if shown == before:
        shown, before = _value(now, digits=9), _value(was, digits=9)
    if shown == before:
        text = f"another code of {place}" if _has_code(now) or _has_code(was) else f"other values of {place}"
    else:
        text = f"{place} {shown}, was {before}"
    return Difference(text, bool(refused(path)))


def _has_code(value: Any) -> bool:
    return isinstance(value, Mapping) and "code" in value


def _codes_differ(was: str | None, now: str | None) -> bool:
    """Whether code differs; that of two versions of Python is not compared."""
    if was is None or now is None:
        return was != now
    return was != now and was.partition(" ")[0] == now.partition(" ")[0]


def _value(value: Any, digits: int = 6) -> str:
    """A value as it is shown; hashes are not."""
    if value is _MISSING:
        return value
    if isinstance(value, float):
        return f"{value:.{digits}g}"
    if isinstance(value, Mapping):
        name = value.get("function") or value.get("class")
        hidden = ("function", "class", "code", "reads", "module", "self")
        inner = ", ".join(f"{k}={_value(v, digits)}" for k, v in value.items() if k not in hidden)
        return f"{name}({inner})" if name and inner else str(name) if name else "{" + inner + "}"
    if isinstance(value, list):
        return _listed([_value(part, digits) for part in value])
    return _HASH.sub("", str(value))


def _listed(values: list) -> str:
    shown = [str(value) for value in values]
    if len(shown) > 8:
        shown = [*shown[:4], f"... {len(shown) - 8} more ...", *shown[-4:]]
    return "[" + ", ".join(shown) + "]"
