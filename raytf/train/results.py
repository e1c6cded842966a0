"""Shows the result of a run as a short table. Driver side."""

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Mapping, Sequence
from typing import Any

from ray.train import Result
from rich.console import Console
from rich.table import Table

from raytf import validation
from raytf.console.progress import format_metric
from raytf.errors import ConfigError
from raytf.storage.run_folder import RunFolder
from raytf.train import run_list


def has_ended(run_config, epochs: int) -> str | None:
    """Returns that a run is complete, as a clause, if its checkpoints show it; otherwise None.

    Args:
        run_config: RunConfig with a name.
        epochs: Number of requested epochs, at least 1.
    """
    folder = RunFolder.from_config(run_config)
    try:
        state = run_list.newest(folder.filesystem, folder.path)
    except OSError:  # of a storage without access, which is reported as the run starts
        return None
    if state is None or not (state.stopped or state.epoch >= epochs):
        return None
    return f"{folder.name} has trained {state.epoch} of {epochs} epochs, and is finished"


def lines(result: Result, folder: str, learned: bool = True) -> list[str]:
    """Returns the lines shown at a training's end: the last epoch's values, the best epoch, the saved model.

    Args:
        result: Result of a trainer.
        folder: The run's folder, a path or a URI.
        learned: Whether `raytf.load_model` reads its checkpoints.
    """
    frame = result.metrics_dataframe
    rows = [] if frame is None else frame.to_dict("records")
    shown = summary(result.metrics or {}, rows)
    if result.checkpoint is None:
        return shown
    if not learned:
        return [*shown, f"saved   {result.checkpoint.path}"]
    if not ended_in_nan(result):
        return [*shown, f'model   raytf.load_model("{folder}")']
    best = run_list.best_of(rows)
    hint = f'; raytf.load_model("{folder}", which="best") has epoch {best[2]}' if best is not None else ""
    return [*shown, f"model   its last loss is NaN or infinite{hint}"]


def ended_in_nan(result: Result) -> bool:
    """Returns whether the loss of the last epoch is NaN or infinite."""
    loss = (result.metrics or {}).get("loss")
    return isinstance(loss, numbers.Real) and not math.isfinite(loss)


def summary(last: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns a line with the last epoch's values, and the best epoch if it is another one; none without values.

    Args:
        last: Values of the last epoch.
        rows: Values of each epoch.
    """
    shown = [f"epoch {last['epoch']}"] if "epoch" in last else []
    for name, value in last.items():
        if isinstance(value, numbers.Real) and not isinstance(value, numbers.Integral):
            shown.append(f"{name} {format_metric(value)}")
    best = run_list.best_of(rows)
    if best is not None and len(rows) > 1 and best[2] != rows[-1].get("epoch"):
        shown.append(f"(best {best[0]} {format_metric(best[1])} in epoch {best[2]})")
    return [f"result  {'  '.join(shown)}"] if shown else []


def show_result(result: Result, console: Console | None = None) -> None:
    """Prints the last epoch's metrics, the paths of checkpoint and logs, and how to load the model.

    Args:
        result: The `ray.train.Result` of a `KerasTrainer`.
        console: A `rich.console.Console`; that of stdout by default.

    Raises:
        ConfigError: `result` is something else.

    Example:
        >>> import ray.train, raytf
        >>> result = ray.train.Result(metrics={"loss": 0.5}, checkpoint=None, error=None, path="runs/digits")
        >>> raytf.show_result(result)    # or of trainer.fit()
    """
    if not hasattr(result, "checkpoint"):
        received = validation.describe(result)
        raise ConfigError("raytf.show_result takes the Result of a run", received, "Pass what trainer.fit() returned")
    console = console or Console()
    console.print("result of the last epoch")  # not as a title, which a narrow table would break
    table = Table("metric", "value")
    for name, value in (result.metrics or {}).items():
        table.add_row(name, format_metric(value) if isinstance(value, float) else str(value))
    console.print(table)
    path = result.checkpoint.path if result.checkpoint else "none"
    console.print(f"checkpoint   {path}", soft_wrap=True, highlight=False)
    if (events := events_of(result)) is not None:
        console.print(f"TensorBoard  tensorboard --logdir {events}", soft_wrap=True, highlight=False)
    if result.checkpoint:
        console.print(f'model        raytf.load_model("{path}")', soft_wrap=True, highlight=False, markup=False)


def events_of(result: Result) -> str | None:
    """Returns the folder of a run's TensorBoard events, or None if this machine has none."""
    events = os.path.join(result.path, "tensorboard")
    return events if os.path.isdir(events) else None
