"""Which scenarios run with how many processes, and in which precision."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import time

from tests.processes.optimizer_scenarios import SCENARIOS

ROOT = pathlib.Path(__file__).parents[2]
# Until a group has ended, from the first question on.
_SECONDS = 4000.0

FLOAT64 = list(SCENARIOS)
# In float32 rounding differs with the order of summation, and training amplifies it.
FLOAT32 = ["cnn_sgd", "mlp_adam", "lstm_adamw", "embedding_sgd", "last_batch_smaller", "gan_dcgan", "gan_in_conditions"]
FLOAT32 += ["what_a_loop_exchanges"]
THREE = [
    "embedding_adam",
    "last_batch_of_one_row",
    "odd_global_batch",
    "predict_all_rows_in_order",
    "batch_normalization_synchronized_uneven",
    "gradient_accumulation",
    "mixed_float16",
    "stop_between_batches",
    *("gan_dcgan", "gan_in_long_executions", "gan_wgan_gp", "gan_in_conditions", "gan_pix2pix", "actor_critic"),
    *("three_optimizers_with_shared_variables", "two_scaled_losses", "vae_with_add_loss", "distillation"),
    "in_batch_contrastive_loss",
]
# Two devices in one process: what reduces, divides and feeds; callbacks are one process' own matter.
LOCAL = [
    *("cnn_sgd", "mlp_adam", "lstm_adamw", "embedding_adam", "masked_tokens", "metrics_that_are_no_averages"),
    *("class_weight", "mean_with_sample_weight", "several_inputs_and_outputs", "predict_all_rows_in_order", "arrays"),
    *("batch_normalization", "batch_normalization_synchronized_uneven", "last_batch_of_one_row", "odd_global_batch"),
    *("steps_per_execution", "run_eagerly", "global_clipnorm", "ema", "regularization", "learning_rate_schedule"),
    *("batch_logs", "train_step_OwnStep", "train_step_BareLogs", "own_add_loss", "on_batch"),
    *("gan_dcgan", "gan_wgan_gp", "gan_pix2pix", "actor_critic"),
]
# In the order in which the groups start, a few at a time: the long ones first.
WANTED = {
    ("float64", "2"): FLOAT64,
    ("float64", "1"): FLOAT64,
    ("float64", "mirrored"): LOCAL,
    ("float64", "central_storage"): LOCAL,
    ("float64", "3"): THREE,
    ("float32", "2"): FLOAT32,
    ("float32", "1"): FLOAT32,
}


def processes(place: str) -> int:
    """How many processes a place has."""
    return int(place) if place.isdigit() else 1


class Behind:
    """Groups of processes (`worker.py`) that run behind all else on the machine.

    Args:
        stages: lists of groups; one begins when all of the one before have ended.
        log: file of the process that starts them.
    """

    def __init__(self, stages, log):
        self._log = log
        command = [sys.executable, "-m", "tests.processes.worker", *map(json.dumps, stages)]
        environment = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
        with open(log, "w") as out:
            self._process = subprocess.Popen(
                command, env=environment, stdout=out, stderr=out, start_new_session=True, cwd=ROOT
            )
        # Ray lowers the priority of its workers, so that a nice value would hardly be behind them
        os.sched_setscheduler(self._process.pid, os.SCHED_IDLE, os.sched_param(0))

    def results(self, folder, name) -> list:
        """What each rank of a group returned for a scenario; waits for the group.

        Raises:
            AssertionError: the group failed, or has not ended in time; it has the logs.
        """
        until = time.monotonic() + _SECONDS
        while not (folder / "codes.json").exists():
            assert time.monotonic() < until, f"{folder.name} has not ended within {_SECONDS} s"
            assert self._process.poll() is None or (folder / "codes.json").exists(), self._log.read_text()[-4000:]
            time.sleep(0.1)
        codes = json.loads((folder / "codes.json").read_text())
        logs = [(folder / f"log.{rank}").read_text()[-4000:] for rank in range(len(codes))]
        assert not any(codes.values()), f"exit codes {codes}\n" + "\n".join(logs)
        return [pickle.loads((folder / f"{name}.{rank}.pkl").read_bytes()) for rank in range(len(codes))]

    def end(self):
        """Ends what still runs."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def parity_folder(folder, dtype: str, place: str):
    """Where a group of `WANTED` leaves its results."""
    return folder / f"{dtype}_{place}"


def parity_stages(folder) -> list[list[dict]]:
    """The groups of `WANTED`, with folders in a folder."""
    return [[_group(parity_folder(folder, *key), *key) for key in WANTED]]


def _group(folder, dtype, place):
    folder.mkdir()
    return {
        "folder": str(folder),
        "dtype": dtype,
        "place": place,
        "world": processes(place),
        # raytf's ring of sockets in float64, TensorFlow's collectives in float32: both have to be right
        "communication": "auto" if dtype == "float64" else "ring",
        "scenarios": WANTED[dtype, place],
    }
