"""Which scenarios run with how many processes, and in which precision."""

from __future__ import annotations

import os
import pathlib
import pickle
from concurrent.futures import ThreadPoolExecutor

from tests.processes.launch import run_group
from tests.processes.optimizer_scenarios import SCENARIOS

FLOAT64 = list(SCENARIOS)
# In float32 rounding differs with the order of summation, and training amplifies it.
FLOAT32 = ["cnn_sgd", "mlp_adam", "lstm_adamw", "embedding_sgd", "last_batch_smaller", "gan_dcgan", "gan_in_conditions"]
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
# In the order in which the groups start, two at a time: the long ones first.
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


class Groups:
    """A group of processes for each entry of `WANTED`, two at a time, behind all else on the machine.

    Args:
        new_folder: new_folder(name) makes a folder for results.
    """

    def __init__(self, new_folder):
        self._pool = ThreadPoolExecutor(2)
        self._running = set()
        folders = {key: str(new_folder(f"{key[0]}_{key[1]}")) for key in WANTED}
        self._groups = {key: (folder, self._pool.submit(self._run, key, folder)) for key, folder in folders.items()}

    def _run(self, key, folder):
        dtype, place = key
        # raytf's ring of sockets in float64, TensorFlow's collectives in float32: both have to be right
        way = "auto" if dtype == "float64" else "ring"
        names = ["--dtype", dtype, "--place", place, "--communication", way, "--only", *WANTED[key]]
        command = ["-m", "tests.processes.worker", "--folder", folder, *names]
        run_group(processes(place), command, folder, timeout=4000, behind=True, running=self._running)

    def result(self, dtype, place, name):
        """What each rank of a group returned for a scenario; waits for the group."""
        folder, done = self._groups[dtype, place]
        done.result()
        paths = [os.path.join(folder, f"{name}.{dtype}.{place}.{rank}.pkl") for rank in range(processes(place))]
        return [pickle.loads(pathlib.Path(path).read_bytes()) for path in paths]

    def end(self):
        """Ends what still runs."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in list(self._running):
            process.kill()
        self._pool.shutdown()
