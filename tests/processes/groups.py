"""Which scenarios run with how many processes, and in which precision."""

from __future__ import annotations

from tests.processes.all_scenarios import SCENARIOS

FLOAT64 = list(SCENARIOS)
# In float32 rounding differs with the order of summation, and training amplifies it.
FLOAT32 = ["kinds_sgd", "kinds_adam", "kinds_adamw", "last_batch_smaller", "gan_dcgan", "gan_in_conditions"]
FLOAT32 += ["circle_loss_with_weights", "metric_functions_that_reduce", "own_compute_loss"]  # which gather rows
FLOAT32 += ["what_a_loop_exchanges", "gradients_halved_on_condition", "gradients_of_an_embedding_clipped"]
FLOAT32 += ["used_rows_by_adam", "fresh_positions_by_adam", "fresh_positions_of_a_fixed_number_of_rows"]
FLOAT32 += ["gradient_penalty", "states_that_say_how_they_are_joined", "callbacks_draw_in_epochs", "own_loop_with_clip"]
THREE = [
    "kinds_adam",
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
    *("padded_lists_without_mask", "python_generator_is_read_once", "datasets_that_know_how_often_they_are_read"),
    *("sparse_rows_of_which_a_worker_has_none", "lists_of_which_a_worker_has_none", "sparse_rows_of_a_generator"),
    *("tf_data_of_global_batches", "tf_data_that_shards_itself", "tf_data_of_lists", "tf_data_of_a_py_dataset"),
    *("losses_that_compare_rows", "unreduced_loss", "added_losses", "own_compute_loss"),
    *("metric_functions_that_reduce", "logs_of_tensors"),
    *("gradients_clip_by_global_norm", "gradients_of_an_embedding_clipped", "gan_with_clip", "gradient_penalty"),
    *("gradient_penalty_of_an_embedding", "unreduced_losses", "states_that_say_how_they_are_joined"),
    *("callbacks_draw_in_batches", "own_loop_with_clip", "used_rows_by_adam", "all_rows_by_adagrad"),
    *("fresh_positions_by_adam", "fresh_noise_on_gradients", "own_loop_with_noise"),
    *("odd_rows_without_zeros", "odd_normalization_of_masked_rows"),
]
# Two devices in one process: what reduces, divides and feeds; callbacks are one process' own matter.
LOCAL = [
    *("kinds_sgd", "kinds_adam", "kinds_adamw", "masked_tokens", "metrics_that_are_no_averages"),
    *("class_weight", "sample_weight", "several_inputs_and_outputs", "predict_all_rows_in_order", "arrays"),
    *("batch_normalization", "batch_normalization_synchronized_uneven", "last_batch_of_one_row", "odd_global_batch"),
    *("steps_per_execution", "run_eagerly", "global_clipnorm_and_ema", "regularization_and_own_add_loss"),
    *("learning_rate_schedule_and_clipvalue", "batch_logs", "train_step_OwnStep", "train_step_BareLogs", "on_batch"),
    *("arrays_of_python_functions", "python_generator_is_read_once", "datasets_that_know_how_often_they_are_read"),
    *("sparse_rows_of_which_a_worker_has_none", "lists_of_which_a_worker_has_none", "sparse_rows_of_a_generator"),
    *("gan_dcgan", "gan_wgan_gp", "gan_pix2pix", "actor_critic", "losses_that_compare_rows", "unreduced_loss"),
    *("added_losses", "own_compute_loss", "metric_functions_that_reduce", "metrics_of_an_own_step", "logs_of_tensors"),
    *("unreduced_loss_in_one_array", "logs_run_eagerly"),
    *("overridden_apply", "overridden_update_step", "reduction_none", "states_that_say_how_they_are_joined"),
    *("own_loop_with_clip", "own_loop_with_its_own_sum", "states_that_do_not_say", "users_losses_of_classes"),
    *("fresh_positions_by_adam", "fresh_positions_run_eagerly", "fresh_positions_of_a_fixed_number_of_rows"),
    *("fresh_noise_on_gradients", "own_loop_with_noise"),
    *("odd_rows_without_zeros", "odd_normalization_of_masked_rows", "odd_metrics_that_do_not_begin_with_zero"),
    "odd_states_that_no_row_changes",
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
# What the gate compares, once: of what users have and write, one of each kind that takes little of a processor.
FAST = {
    ("float64", "2"): [
        *("kinds_adam", "batch_normalization_synchronized_uneven", "last_batch_of_one_row", "steps_per_execution"),
        *("gradient_accumulation", "global_clipnorm_and_ema", "regularization_and_own_add_loss", "mixed_float16"),
        *("predict_all_rows_in_order", "stop_between_batches", "files_by_the_chief", "early_stopping"),
        *("gradients_clip_by_global_norm", "overridden_apply", "gradient_penalty", "own_loop_with_clip"),
        *("circle_loss_with_weights", "unreduced_loss", "own_compute_loss", "metric_functions_that_reduce"),
        *("logs_of_tensors", "states_that_say_how_they_are_joined", "callbacks_draw_in_epochs"),
        *("the_chiefs_draw_counts", "python_generator_is_read_once", "sparse_rows_of_which_a_worker_has_none"),
        *("tf_data_of_global_batches", "fresh_positions_by_adam"),
    ]
}


def processes(place: str) -> int:
    """How many processes a place has."""
    return int(place) if place.isdigit() else 1


def parity_folder(folder, dtype: str, place: str):
    """Where a group of `WANTED` leaves its results."""
    return folder / f"{dtype}_{place}"


def parity_stages(folder, ids) -> list[list[dict]]:
    """The groups of `WANTED` with what the tests of some ids compare, with folders in a folder.

    Args:
        folder: of the results.
        ids: of tests, "...[SCENARIO-PLACE-DTYPE]"; those of other tests are passed over.
    """
    asked = {tuple(its.partition("[")[2].removesuffix("]").rsplit("-", 2)) for its in ids}
    compared = {key: [name for name in names if (name, key[1], key[0]) in asked] for key, names in WANTED.items()}
    for dtype in ("float64", "float32"):
        others = {name for key, names in compared.items() if key[0] == dtype for name in names}
        compared[dtype, "1"] = [name for name in WANTED[dtype, "1"] if name in others]
    return [[_group(parity_folder(folder, *key), *key, names) for key, names in compared.items() if names]]


def _group(folder, dtype, place, scenarios):
    folder.mkdir()
    return {
        "folder": str(folder),
        "dtype": dtype,
        "place": place,
        "world": processes(place),
        # raytf's ring of sockets in float64, TensorFlow's collectives in float32: both have to be right
        "communication": "auto" if dtype == "float64" else "ring",
        "scenarios": scenarios,
    }
