"""Which scenarios run with how many processes, and in which precision."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from tests.processes.launch import run_group
from tests.processes.scenarios import SCENARIOS

FLOAT64 = list(SCENARIOS)
# In float32 rounding differs with the order of summation, and training amplifies it.
FLOAT32 = ["cnn_sgd", "mlp_adam", "lstm_adamw", "embedding_sgd", "last_batch_smaller"]
THREE = [
    "embedding_adam",
    "last_batch_of_one_row",
    "odd_global_batch",
    "predict_all_rows_in_order",
    "batch_normalization_synchronized_uneven",
    "gradient_accumulation",
    "mixed_float16",
    "stop_between_batches",
]
# Two devices in one process: what reduces, divides and feeds; callbacks are one process' own matter.
LOCAL = [
    *("cnn_sgd", "mlp_adam", "lstm_adamw", "embedding_adam", "masked_tokens", "metrics_that_are_no_averages"),
    *("class_weight", "mean_with_sample_weight", "several_inputs_and_outputs", "predict_all_rows_in_order", "arrays"),
    *("batch_normalization", "batch_normalization_synchronized_uneven", "last_batch_of_one_row", "odd_global_batch"),
    *("steps_per_execution", "run_eagerly", "global_clipnorm", "ema", "regularization", "learning_rate_schedule"),
    *("batch_logs", "train_step_OwnStep", "train_step_BareLogs", "own_add_loss", "on_batch"),
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


def start(pool: ThreadPoolExecutor, new_folder) -> dict[tuple[str, str], tuple[str, Future]]:
    """Starts a group of processes for each entry of `WANTED`; each runs all its scenarios once.

    Returns:
        (dtype, place) -> (the folder of the results, a future that is done when they are there).
    """

    def run(key, folder):
        dtype, place = key
        # raytf's ring of sockets in float64, TensorFlow's collectives in float32: both have to be right
        way = "auto" if dtype == "float64" else "ring"
        names = ["--dtype", dtype, "--place", place, "--communication", way, "--only", *WANTED[key]]
        run_group(processes(place), ["-m", "tests.processes.worker", "--folder", folder, *names], folder, timeout=1500)

    folders = {key: str(new_folder(f"{key[0]}_{key[1]}")) for key in WANTED}
    return {key: (folder, pool.submit(run, key, folder)) for key, folder in folders.items()}
