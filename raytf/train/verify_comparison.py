"""Compares the results of one device with those of two workers, and explains what differs. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from raytf.errors import ConfigError

# Smaller differences are rounding, relative to a value, or to the change of a weight in the steps: by the bits of the
# narrowest numbers that the model computes with. Gradients that nearly cancel keep few digits, which Adam makes large.
_ROUNDING = {16: 2e-2, 32: 1e-3, 64: 1e-5}
# A difference counts if it exceeds so many times the effect of other last bits and other seeds.
_TIMES = 30.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerificationResult:
    """Result of a comparison.

    Args:
        differences: One sentence each; empty if two workers train as one device does.
        failed: Why nothing could be compared, or None.
        skipped: Why nothing was compared on purpose, or None.
        random: Names of values that also differ between two runs of one device, and so prove nothing.
        few: Why a model with code of the user's was compared on a few rows alone, or None.
        model: The model, in messages.
    """

    differences: tuple[str, ...] = ()
    failed: str | None = None
    skipped: str | None = None
    random: tuple[str, ...] = ()
    few: str | None = None
    model: str = "this model"

    def text(self) -> str:
        """Returns the message for the user, or "" without one."""
        if self.failed is not None:
            return f"verify: whether two workers train {self.model} as one process does is not known: {self.failed}"
        if not self.differences:
            return ""
        shown = "".join(f"\n  - {line}" for line in self.differences)
        return (
            f"verify: two workers do not train {self.model} as one process does, on a few of your rows in two steps:"
            f"{shown}\nPass verify=False (--verify off) to train all the same without this check, or verify='error' "
            "to refuse it."
        )

    def error(self) -> ConfigError:
        """Returns the error for `verify="error"`."""
        return ConfigError(
            "With verify='error' several workers must train a model as one process does",
            "; ".join(self.differences) or f"no result: {self.failed}",
            "Correct the model, or pass verify='warn' or verify=False",
        )


@dataclasses.dataclass(frozen=True)
class _Gap:
    """Difference of two runs in one value.

    Args:
        kind: "log", "weight", "state", "slot" or "rate".
        gap, scale: The difference, and the scale that it is relative to.
        shown: Text with both values.
        how: Aggregation of the variable, if `kind` is "state".
    """

    kind: str
    gap: float
    scale: float
    shown: str
    how: str = ""


def _gaps(single_run: Mapping[str, Any], double_run: Mapping[str, Any]) -> dict[str, _Gap]:
    gaps = {}
    for name in [*single_run["logs"], *(name for name in double_run["logs"] if name not in single_run["logs"])]:
        if name not in single_run["logs"] or name not in double_run["logs"]:
            gaps[f"log {name}"] = _Gap("log", np.inf, 1.0, "there on one of them alone")
            continue
        gaps[f"log {name}"] = _gap_of("log", *(run["logs"][name] for run in (single_run, double_run)))
    for (path, initial, single), (_, _, double) in zip(single_run["weights"], double_run["weights"], strict=True):
        initial, single, double = (np.asarray(value, np.float64) for value in (initial, single, double))
        moved, distance = (
            _norm(single - initial),
            _norm(np.where(np.isnan(single) & np.isnan(double), 0, single - double)),
        )
        floor = 8 * np.finfo(np.float32).eps * _norm(single) / _ROUNDING[single_run["bits"]]
        shown = f"apart by {distance / max(moved, 1e-30):.2g} times what the two steps change"
        gaps[f"weight {path}"] = _Gap("weight", distance, moved + floor, shown)
    for (path, single, how), (_, double, _) in zip(single_run["states"], double_run["states"], strict=True):
        gaps[f"state {path}"] = _gap_of("state", single, double, how)
    for kind in ("slot", "rate"):
        for (path, single), (_, double) in zip(single_run[f"{kind}s"], double_run[f"{kind}s"], strict=True):
            gaps[f"{kind} {path}"] = _gap_of(kind, single, double)
    return gaps


def _gap_of(kind: str, single, double, how: str = "") -> _Gap:
    a, b = np.asarray(single, np.float64), np.asarray(double, np.float64)
    shown = f"{a.ravel()[0]:.6g} on one device, {b.ravel()[0]:.6g} on two workers" if a.size else ""
    return _Gap(kind, _most(a - b, a, b), float(np.max(np.abs(a), initial=1e-6)), shown, how)


def _norm(values: np.ndarray) -> float:
    return float(np.sqrt(np.sum(np.square(values))))


def _most(gap: np.ndarray, a: np.ndarray, b: np.ndarray) -> float:
    """Returns the largest difference; two NaN have none."""
    gap = np.where((np.isnan(a) & np.isnan(b)) | (a == b), 0.0, np.abs(gap))
    return float(np.max(np.where(np.isnan(gap), np.inf, gap), initial=0.0))


def differing_values(single: Mapping[str, Any], double: Mapping[str, Any]) -> list[str]:
    """Returns the names of values that differ by more than rounding does in most models."""
    most = _ROUNDING[single["bits"]]
    return [name for name, difference in _gaps(single, double).items() if not difference.gap <= most * difference.scale]


def compare_runs(
    single: dict, double: dict, repeated: dict, candidates: Sequence[str], alike: bool
) -> VerificationResult:
    """Returns the proof: which suspects differ by more than other last bits and other seeds change on one device.

    Args:
        single, double: Outcomes on one device and on two workers.
        repeated: Outcome on one device with other last bits and seeds.
        candidates: Result of `differing_values`.
        alike: Whether both workers have the same weights.
    """
    gaps, noise = _gaps(single, double), _gaps(single, repeated)
    real = [name for name in candidates if gaps[name].gap > _TIMES * noise[name].gap]
    kinds = lambda names: {gaps[name].kind for name in names}
    if "weight" in kinds(set(candidates) - set(real)) and "weight" not in kinds(real):
        real = [name for name in real if gaps[name].kind != "log"]  # logs of random weights are random, too
    random = tuple(name for name in candidates if name not in real)
    traits, differences = single["traits"], []
    if not alike:
        differences.append(
            "the two workers have other weights than each other, or another state of the optimizer, after two steps: a "
            "step draws numbers or reads a clock that seeds do not set, or changes weights without an optimizer. Let "
            "the optimizer change them"
        )
    logs, weights, states, slots, rates = (
        [name for name in real if gaps[name].kind == kind] for kind in ("log", "weight", "state", "slot", "rate")
    )
    differences += [_of_state(name, gaps[name]) for name in states]
    if weights:
        differences.append(_of_weights(weights, gaps, traits))
    elif slots:
        worst = max(slots, key=lambda name: gaps[name].gap / gaps[name].scale)
        gap_text = f"the optimizer's state, most of all {worst.removeprefix('slot ')}: {gaps[worst].shown}"
        differences.append(f"{gap_text}; later steps depend on it. {_why_weights(traits)}")
    for name in rates:
        gap_text = f"the learning rate of {name.removeprefix('rate ')}: {gaps[name].shown}"
        differences.append(f"{gap_text}. Let it depend on the step alone, or on what all workers know alike")
    differences += [_of_log(name.removeprefix("log "), gaps[name], traits, bool(weights)) for name in logs]
    return VerificationResult(differences=tuple(differences), random=random)


def _of_state(name: str, gap: _Gap) -> str:
    path = name.removeprefix("state ")
    if gap.how in ("sum", "mean"):
        return (
            f"{path}, a variable that is not trained: {gap.shown}; its aggregation is {gap.how!r}. Either it follows "
            f"from another difference, or its value of all rows is no {gap.how} of workers' values: a mean by class or "
            "by weights is none. Keep sums and counts for it with aggregation='sum'"
        )
    why = (
        "each worker counts or averages its own rows"
        if gap.how in ("none", "only_first_replica")
        else f"its aggregation is {gap.how!r}"
    )
    return (
        f"{path}, a variable that is not trained: {gap.shown}; {why}. Say how workers join it: "
        "add_weight(..., aggregation='sum') for what is counted, aggregation='mean' for what is averaged"
    )


def _of_weights(names: Sequence[str], gaps: Mapping[str, _Gap], traits: Mapping[str, Any]) -> str:
    worst = max(names, key=lambda name: gaps[name].gap / gaps[name].scale)
    subject = (
        "all weights"
        if len(names) == len([g for g in gaps.values() if g.kind == "weight"])
        else (f"{len(names)} weight(s)")
    )
    return f"{subject}, most of all {worst.removeprefix('weight ')}: {gaps[worst].shown}; {_why_weights(traits)}"


def _why_weights(traits: Mapping[str, Any]) -> str:
    methods = traits["methods"]
    if traits["python"]:
        return (
            f"steps change {', '.join(traits['python'])} in Python, which each worker has for itself, of its own rows. "
            "Keep it in a variable: add_weight(..., trainable=False, aggregation='sum' or 'mean')"
        )
    if "train_step" in methods:
        return (
            f"train_step ({methods['train_step']}) makes something of its own worker's rows: a sum, a slice, a mean by "
            "tf.shape, a division by the number of replicas, or what compares rows. Take the loss from "
            "self.compute_loss(x, y, y_pred, sample_weight). Write what needs the whole batch as a loss for compile(), "
            "which gets the rows of all workers. Leave clipping to the optimizer"
        )
    if "compute_loss" in methods:
        return (
            f"compute_loss ({methods['compute_loss']}) divides by the rows, or looks at the rows, of its own worker. "
            "Pass a keras.losses.Loss to compile() instead, which is computed over all rows"
        )
    if traits["losses"]:
        return (
            f"the loss {traits['losses'][0]} makes something of its own worker's rows. Let it return a mean over rows, "
            "or a value for each row that other rows do not change"
        )
    if traits["optimizers"]:
        return f"the optimizer {traits['optimizers'][0]} may use gradients before they are summed. Override update_step"
    if traits["layers"]:
        return (
            f"a layer of your own ({', '.join(traits['layers'][:3])}) may look at the other rows of its worker, or add "
            "a loss that is a sum. Let each row depend on itself alone, and pass means to add_loss"
        )
    return "something depends on how rows are divided between workers"


def _of_log(name: str, gap: _Gap, traits: Mapping[str, Any], weights: bool) -> str:
    bare, methods = name.removeprefix("val_"), traits["methods"]
    step = "test_step" if name.startswith("val_") else "train_step"
    for metric, definition, is_function in traits["metrics"]:
        if metric == bare and is_function:
            why = (
                f"{definition} is a function that reduces its batch, of which workers' values are averaged. Make it a "
                "keras.metrics.Metric that keeps sums, and divides them in result()"
            )
            return f"the metric {name}: {gap.shown}; {why}"
        if metric == bare:
            why = f"{definition} keeps what does not add up over workers. Let its variables be sums over rows"
            return f"the metric {name}: {gap.shown}; {why}"
    if step in methods and weights:
        why = f"as the weights differ, or {step} ({methods[step]}) returns a value of its own worker's rows"
    elif step in methods:
        why = (
            f"{step} ({methods[step]}) returns a value of its own worker's rows. Give the value to a "
            "keras.metrics.Mean, with the number of rows as its sample_weight, and return its result()"
        )
    elif "compute_loss" in methods and bare == "loss":
        why = f"compute_loss ({methods['compute_loss']}) gives a value of its own worker's rows"
    else:
        why = "as the weights differ" if weights else "its value is not the one of all rows"
    return f"the log {name}: {gap.shown}; {why}"
