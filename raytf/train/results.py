"""What a run ended with, as a short table. Driver side."""

from __future__ import annotations

import os

from ray.train import Result
from rich.console import Console
from rich.table import Table


def show_result(result: Result, console: Console | None = None) -> None:
    """Prints the last epoch's values, where checkpoint and logs lie, and how to load the model.

    Args:
        result: the `ray.train.Result` of a `KerasTrainer`.
        console: where to print; the terminal by default.
    """
    console = console or Console()
    table = Table("metric", "value", title="result of the last epoch", title_justify="left")
    for name, value in (result.metrics or {}).items():
        table.add_row(name, f"{value:.4f}" if isinstance(value, float) else str(value))
    console.print(table)
    where = result.checkpoint.path if result.checkpoint else "none"
    console.print(f"checkpoint   {where}", soft_wrap=True, highlight=False)
    events = os.path.join(result.path, "tensorboard")
    if os.path.isdir(events):
        console.print(f"TensorBoard  tensorboard --logdir {events}", soft_wrap=True, highlight=False)
    if result.checkpoint:
        console.print(f'model        raytf.load_model("{where}")', soft_wrap=True, highlight=False, markup=False)
