"""One call of `raytf.fit`, `evaluate` or `predict`: its data, its workers and its results. Driver side.

Over 500 lines: one class, whose steps share the state of a call.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import ray
import tensorflow as tf
from keras import tree
from ray.train import RunConfig, ScalingConfig

from raytf import events, logs, timeouts
from raytf.compat import keras_objects
from raytf.compat.keras import compute_output_spec
from raytf.console import phases as phases_module
from raytf.console import progress
from raytf.console.lines import print_line
from raytf.console.output import Output
from raytf.data import ingest, streamed
from raytf.data.columns import of_dataset
from raytf.data.feed import Feed, open_feed
from raytf.data.pipeline import PipelineFeed
from raytf.data.sampling import Sampling
from raytf.data.stored import FIRST_ROWS, StoredDataset
from raytf.data.tf_data import TFData
from raytf.errors import ConfigError, StoppedCallError, StoppedError, TrainingError, without_escapes
from raytf.fitting import arrays, fit_training, fit_worker, transport, warm
from raytf.fitting.background_verification import BackgroundVerification
from raytf.fitting.named_checkpoints import NamedFitCheckpoints, training_identity
from raytf.identity import canonical, fingerprint
from raytf.logs import warn_user
from raytf.parallel import model_optimizers
from raytf.runtime import answers, resources
from raytf.runtime.processes import worker_environment
from raytf.runtime.settings import TensorflowConfig, WorkerSetup
from raytf.storage.run_lock import RunLock
from raytf.train import results
from raytf.train.graceful_stop import GracefulStop
from raytf.train.prepare import placed
from raytf.train.worker_group import TrialError, TrialRun, WorkerGroupLostError
from raytf.worker import fit, inputs, labels, stop

logger = logs.get_logger(__name__)

# Seconds that a finished call waits for an unknown outcome; a later outcome is logged when it is known.
_COMPARISON_INTERVAL = 1.0
# Worker losses that a call recovers from; repeated deaths have a cause to look for.
_MAX_RECOVERIES = 3
_DOES = {"evaluate": "evaluating", "predict": "predicting"}
_AT_ONCE = "ended at once; the model has the weights of the last epoch that had ended, if one had"


class Call:
    """One call: its data, its workers and its results.

    Args:
        model: The user's model.
        scaling_config, run_config: Configs of the workers.
        parts: `arrays.RowData` by name.
        checkpoints: Its checkpoints, or None for a call without a name.
        phases: Shows the phases before the first step.

    Attributes:
        objects: Objects of the model and the callbacks, by number.
        verify: "warn" or "error" compares two workers with one process, see `background_verification`; False does not.
    """

    def __init__(
        self,
        model,
        scaling_config: ScalingConfig,
        run_config: RunConfig,
        parts: dict[str, arrays.RowData],
        checkpoints: NamedFitCheckpoints | None = None,
        phases: phases_module.Phases | None = None,
    ):
        self._phases = phases or phases_module.Phases(None)
        self._model, self._scaling, self._run = model, scaling_config, run_config
        self._parts, self._checkpoints = parts, checkpoints
        self._files: dict[str, bytes] | None = None
        self._stop_request: GracefulStop | None = None
        self._lock: RunLock | None = None
        self._resume_from: dict[str, Any] = {}
        self._group: warm.WarmGroup | None = None
        self._last: dict | None = None  # the state for the model
        self._ends = contextlib.ExitStack()
        self._connected = False
        self.verify: str | bool = False

    def __enter__(self) -> Call:
        self._phases.__enter__()
        return self

    def __exit__(self, kind, error, traceback) -> None:
        self.close()
        if kind is KeyboardInterrupt:  # a script whose process has imported Ray would exit with code 1
            logger.warning(f"SIGINT: {_AT_ONCE}")
            raise StoppedCallError(signal.SIGINT, _AT_ONCE) from None
        if kind is StoppedError and error.number == signal.SIGINT:
            raise StoppedCallError(error.number, error.status, error.step) from None

    def _read(self) -> None:
        """Reads datasets that are no arrays; raises ConfigError for one without rows, or without the columns."""
        datasets = {name: part.dataset for name, part in self._parts.items() if part.table is None}
        if not datasets:
            return
        self._connect()
        self._phases.begin(phases_module.READING)
        self._resume_from = ingest.read_all(datasets, "auto", self._scaling, self._parts["train"].batch.roles)
        for name, dataset in self._resume_from.items():
            if isinstance(dataset, TFData):
                continue
            if not dataset.rows:
                argument = "x" if name == "train" else "validation_data"
                received = f"{argument}, which is empty"
                raise ConfigError("A dataset must hold rows", received, "Check the path or the filter that made it")
            self._parts[name].batch.check(dataset.columns)

    def _connect(self) -> None:
        if not self._connected:
            self._phases.begin(phases_module.starting_phase())
        self._scaling = placed(self._scaling, resources.run_bundles(self._scaling), keep_idle=True)
        if not self._connected:  # a Ray started here handles SIGTERM itself; SIGINT is Python's KeyboardInterrupt
            signals = (signal.SIGTERM,) if self._checkpoints is None else (signal.SIGTERM, signal.SIGINT)
            self._stop_request = self._ends.enter_context(
                GracefulStop(after_step=False, signals=signals, at_once=_AT_ONCE)
            )
            if self._checkpoints is not None:
                self._lock = self._ends.enter_context(self._checkpoints.lock())
                self._stop_request.record(self._checkpoints.run.filesystem, self._checkpoints.run.path)
            self._connected = True
        resources.check_cluster(self._scaling)

    def _example(self, name: str) -> tf.data.Dataset:
        """Returns a dataset with the shapes and types of one of the parts."""
        return fit_worker.restructure(self._feed(name, 2).dataset(), self._parts[name].structure)

    def _feed(self, name: str, rows: int) -> Feed | PipelineFeed:
        part = self._parts[name]
        if part.table is not None:
            blocks = _stored(part.table.slice(0, FIRST_ROWS))
        else:
            dataset = self._resume_from[name]
            if isinstance(dataset, TFData):
                sampling = Sampling(global_batch=dataset.facts.rows, shuffle="none")
                return open_feed(dataset, part.batch, sampling, name=name, saved={"steps": 1})
            blocks = dataset.first() if dataset.rows else dataset
        return Feed(blocks, part.batch, Sampling(global_batch=rows, shuffle="none"), shapes_only=True)

    def build(self, do: str) -> float:
        """Creates all variables of the model, and checks that the data fits it.

        Args:
            do: "fit", "evaluate" or "predict".

        Returns:
            Bytes of a row of its outputs if known, else 0.
        """
        self._read()
        self._phases.begin(phases_module.TRYING)
        model, example = self._model, self._example("train")
        spec, name = example.element_spec, ""
        if do != "predict":
            labels.check_kind(model, spec)
        try:
            if do != "predict":
                fit.build_from_data(model, example, do)
                labels.check_shapes(model, spec)
                self._check_labels("train", spec)
            _check_types(model, spec, do, "Correct the data or the model")
            if do == "fit":
                _build_rest(model, spec)
            row_bytes = _check_shapes(model, spec, do)
            if "validation" in self._parts:
                spec, name = self._example("validation").element_spec, "validation_data: "
                labels.check_kind(model, spec)
                with of_dataset("validation"):
                    _check_types(model, spec, "evaluate", "Correct validation_data")
                _check_shapes(model, spec, "evaluate")
                self._check_labels("validation", spec)
            return row_bytes
        except ConfigError:
            raise
        except Exception as error:
            labels.refuse_unknown(error)
            bare = do != "predict" and len(spec if isinstance(spec, tuple) else (spec,)) == 1
            raise ConfigError(
                "The model must fit the data",
                f"{name}{_describe_spec(spec)}{' without y' if bare else ''} ({_explained(error)})",
                (None if do == "predict" else labels.hint(model, spec))
                or "Correct the model or the data"
                + ("; a loss compares with y, or labels= of a table" if bare else ""),
            ) from error

    def _check_labels(self, name: str, spec) -> None:
        """Raises ConfigError for labels that the loss does not accept: all of arrays, else those of the first rows."""
        if not isinstance(spec, tuple) or len(spec) < 2:
            return
        with of_dataset(name):
            labels.check_values(self._model, spec, self._labels(name), weighted=len(spec) > 2)

    def _labels(self, name: str) -> Iterator[Any]:
        part = self._parts[name]
        source = self._resume_from[name] if part.table is None else _stored(part.table)
        if isinstance(source, TFData):
            rows = next(iter(self._feed(name, 2).first_batch()))
            yield labels.dense(rows[1])
            return
        for values in labels.of_rows(source if part.table is not None else source.first(), part.batch.labels):
            yield (
                values
                if part.structure is None
                else tree.map_structure(values.get, tree.lists_to_tuples(part.structure[1]))
            )

    def pack(self, users: Sequence) -> None:
        """Serializes the model and the callbacks.

        Raises:
            ConfigError: One of them does not pickle.
        """
        self._data, sent = transport.serialize_named([(f"the model {self._model.name!r}", self._model)])
        names = [(f"callback {i}, a {type(c).__name__}", c) for i, c in enumerate(users)]
        self._callbacks, callback_objects = transport.serialize_named(names, sent)
        self._values = sent.values()
        self.objects = sent.joined(callback_objects)

    def resume_state(self, seed: int, batch: int, arguments: dict, shown: bool = True) -> tuple[int, dict]:
        """Returns the seed and the state to resume from, if a checkpoint of the same training exists.

        Args:
            seed: Seed of a new training.
            batch: Rows of the global batch.
            arguments: Arguments of the call that change the result.
            shown: Whether to print the location of the checkpoints.

        Returns:
            (the seed of the training, further fields of `fit_worker.CallWork`).

        Raises:
            ConfigError: There is a checkpoint of another training, or another driver holds the lock of its name.
        """
        if self._checkpoints is None:
            return seed, {}
        self._connect()
        self._lock.confirm()
        rows = {
            name: 0 if isinstance(dataset, TFData) else sum(dataset.rows) for name, dataset in self._resume_from.items()
        }
        if shown:
            print_line(f"run     {self._checkpoints.user_path}")
        run_identity = training_identity(self._model, self._parts, rows, batch, arguments)
        self._files, state = self._checkpoints.newest(run_identity)
        return (seed if state is None else state.seed), {
            "checkpoint_every": self._checkpoints.interval,
            "identity": run_identity,
        }

    def work(
        self, do: str, batches: dict, seed: int, shuffle: str, arguments: dict, drops: bool = False, **more
    ) -> fit_worker.CallWork:
        """Returns the work for the workers; puts the rows into Ray's object store."""
        self._connect()
        rows = {}
        for name, part in self._parts.items():
            blocks = self._resume_from.get(name) or part.stored()
            order = shuffle if name == "train" else "none"
            if order == "full" and isinstance(blocks, streamed.StreamedDataset):
                order = "window"
            drop_remainder = drops and name == "train"
            sampling = Sampling(global_batch=batches[name], seed=seed, shuffle=order, drop_remainder=drop_remainder)
            rows[name] = fit_worker.FitDataset(
                dataset=blocks, batch=part.batch, sampling=sampling, structure=part.structure
            )
        settings = transport.global_settings()
        key = hashlib.sha256(self._data + repr(sorted(settings.items())).encode()).hexdigest()
        self._sending = {"key": key, "values": self._values, "settings": settings, "folder": os.getcwd()}
        steps = self._model.steps_per_execution if self._model.compiled else 1
        self._work = {"do": do, "callbacks": self._callbacks, "rows": rows, "seed": seed, "arguments": arguments}
        return self._work | {"compiled_steps": steps, **more}

    def reports(self, work: dict, board=None):
        """Sends the work and yields each worker's reports until it ends; keeps the workers for the next call.

        Raises:
            TrainingError: A worker failed.
        """
        setup = WorkerSetup(config=TensorflowConfig(seed=0))
        shown = Output(worker_environment(self._run, self._scaling)["env_vars"])
        well = False
        verification = None
        try:
            self._phases.begin(phases_module.WORKERS)
            self._group = warm.take_group(self._scaling, self._run, setup)
            verification = self._start_verification(work, self._group)
            if verification is not None and self.verify == "error":
                verification.wait(timeouts.get().verify_error)
            group, known = self._group, self._sending["key"] == self._group.model
            sending = fit_worker.SentModel(data=None if known else self._data, **self._sending)
            group.model = self._sending["key"]
            work_config = {"work": fit_worker.CallWork(model=sending, board=board, **work)}
            mid_epoch = None if self._checkpoints is None else self._checkpoints.location
            more = {"step_checkpoints": mid_epoch, "max_recoveries": _MAX_RECOVERIES if work.get("recovers") else 0}
            run = TrialRun(train=fit_worker.run_call, config=work_config, name=work["do"], files=self._files, **more)

            def restart_reports() -> TrialRun:
                """Returns the run for a process without the model."""
                sending = fit_worker.SentModel(data=self._data, **self._sending)
                config = {"work": dataclasses.replace(work_config["work"], model=sending)}
                return dataclasses.replace(run, config=config, files=None)

            group.worker_group.begin(run, restart_reports)
            self._phases.begin(_DOES.get(work["do"]))
            with self._stop_request.calls(self._ignore_signal) if mid_epoch is not None else contextlib.nullcontext():
                why = None if mid_epoch is None else self._why_end
                while (reports := group.worker_group.continue_trial(why)) is not None:
                    if verification is not None:
                        verification.check()
                    yield reports
                    if reports[0].get("ended"):
                        if any(report.get("changed") for report in reports):
                            group.model = None  # the workers changed their model: the next call must send one again
                        break
            group.worker_group.stop()
            if group.worker_group.ended is not None:  # ends the workers, whose last epoch is no later call's
                self._raise_stopped(group.worker_group.ended)
            well = True
        except TrialError as error:
            raise TrainingError(error.rank, error.cause, error.details) from None
        except WorkerGroupLostError as error:
            why = (
                ""
                if error.why_not_recovered is None
                else f"; it could not be replaced in place: {error.why_not_recovered}"
            )
            raise TrainingError(None, f"{error}{why}") from None
        finally:
            shown.close(sys.exc_info()[1])
            if self._group is not None:
                if work["do"] == "fit" and not well:
                    self._last = self._last_epoch()
                self._end_group(well)
        if verification is not None:
            verification.wait(_COMPARISON_INTERVAL, more=True)

    def _definition(self) -> str:
        """Returns a hash of the model's definition: that of folds of a cross-validation is the same."""
        attributes = fit_worker.plain_attributes(self._model)
        attributes = {key: value for key, value in attributes.items() if key[1] != "name"}  # Keras numbers names
        settings = sorted(self._sending["settings"].items())
        return canonical.hash_value(repr((fingerprint.model_fingerprint(self._model), attributes, settings)))

    def _start_verification(self, work: dict, group: warm.WarmGroup) -> BackgroundVerification | None:
        """Starts a comparison of two workers with one process, unless this group has compared such a model before."""
        if not self.verify or self._scaling.num_workers == 1:
            return None
        key = self._definition()
        if key in group.verified and self.verify != "error":
            return None
        group.verified.add(key)
        drop = functools.partial(group.verified.discard, key)
        blocks = {name: rows.dataset.first().with_blocks() for name, rows in work["rows"].items()}
        sending = fit_worker.SentModel(data=self._data, **self._sending)
        return BackgroundVerification(
            self._model.name, self._scaling, self._run, self.verify, sending, work["rows"], blocks, drop
        )

    def _ignore_signal(self) -> None:
        """Does nothing: `_why_end` detects the first signal at its next poll."""

    def _why_end(self) -> str | None:
        self._lock.check()
        return None if self._stop_request.number is None else stop.STOP

    def _raise_stopped(self, step: int) -> None:
        """Raises StoppedError after a signal ended the training at a step."""
        last = self._checkpoints.last()
        if last < step:
            saved = f"the last one is of step {last}" if last else "there is no other one"
            text = f"it has stopped after step {step}, and the checkpoint of that step is not saved; {saved}"
            raise TrainingError(None, text)
        name = self._checkpoints.run.name
        progress_text = f"stopped after step {step}; checkpoint saved. The same call with name={name!r} resumes from it"
        raise StoppedError(self._stop_request.number, progress_text, step)

    def _last_epoch(self) -> dict | None:
        """Returns a worker's state after the last complete epoch; None if there is none, or no such worker remains."""
        size = sum(getattr(value, "nbytes", 0) for value in self._values.values())
        seconds = timeouts.deadline(timeouts.get().last_epoch, size)
        for rank, worker in enumerate(self._group.worker_group.actors[: fit_training.HOLD_LAST]):
            call = worker.execute.remote(fit_training.last_epoch)
            with contextlib.suppress(ray.exceptions.RayError, answers.NoAnswerError):
                (state,) = answers.collect_answers(
                    [call], seconds, "the last epoch's weights", names=[f"worker {rank}"]
                )
                if state:
                    return state
        return None

    def _end_group(self, well: bool) -> None:
        group, self._group = self._group, None
        warm.keep_group(group) if well else group.close()

    def fit(self, work: dict, users: Sequence, verbose):
        """Trains; in any case the model receives the state after the last complete epoch."""
        model = self._model
        history = next((c for c in users if isinstance(c, keras.callbacks.History)), None) or keras.callbacks.History()
        board = progress.Board() if verbose else None
        happened: list[events.RunEvent] = []
        try:
            with events.recorded(happened.append):
                for reports in self._show_progress(work, board):
                    if reports[0].get("ended"):
                        self._last = reports[0]
        finally:
            if board is not None:
                board.clear()
            if self._last is not None:
                self._apply_report(self._last, users, history)
        model.history = history
        vars(history)["events"] = happened
        if self._checkpoints is not None:
            self._lock.check()  # else they are another driver's
            self._checkpoints.forget()
            if verbose:
                for line in results.summary(*_rows(history)):
                    print_line(line)
                print_line("model   has the trained weights; the checkpoints of the run, which has ended, are removed")
        return history

    def _show_progress(self, work: dict, board):
        if board is None:
            yield from self.reports(work)
            return
        self._phases.close()
        with progress.ProgressLine(board, phases_module.console()):
            yield from self.reports(work, board)

    def _apply_report(self, report: dict, users: Sequence, history) -> None:
        """Assigns the chief's report to the objects of this process."""
        self.objects.assign(report["values"])
        optimizers = model_optimizers.optimizers_of(self._model)
        for name, (kind, trained, values) in report["built"].items():
            optimizer = optimizers.get(name)
            if optimizer is None or None in trained:
                warn_user(f"The state of {name} stays on the workers: it trains what is not the model's")
                continue
            alike = type(optimizer).__name__ == kind
            if alike and not optimizer.built:
                optimizer.build([self.objects.objects[i] for i in trained])
            if not alike or [tuple(v.shape) for v in optimizer.variables] != [np.shape(v) for v in values]:
                warn_user(  # a callback has recompiled the model
                    f"The state of {name} stays on the workers: a callback has compiled the model with another "
                    f"{kind}. Compile it likewise here before it is trained further",
                )
                continue
            for variable, value in zip(optimizer.variables, values, strict=True):
                variable.assign(np.array(value))
        vars(history).update(_model=self._model, params=report.get("params"))
        history.history, history.epoch = report["history"]
        if "callbacks" in report:
            transport.apply_attributes(users, report["callbacks"], self.objects)
            if lost := [name for name in report["lost"] if not name.split(".", 1)[1].startswith("_")]:
                warn_user(f"What does not pickle stays on the workers: {', '.join(lost)}")
        for callback in users:
            vars(callback)["_model"] = self._model

    def close(self) -> None:
        """Ends workers that are still busy, and releases prefetched data."""
        try:
            if self._group is not None:
                self._end_group(well=False)
            streamed.close(self._resume_from)
        finally:
            self._phases.close()
            self._ends.__exit__(*sys.exc_info())


def _stored(table) -> StoredDataset:
    return StoredDataset([table], [table.num_rows], list(table.column_names))


def _rows(history) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns (the last epoch's values, those of each epoch) of a history."""
    whole = {name: values for name, values in history.history.items() if len(values) == len(history.epoch)}
    rows = [{"epoch": e + 1} | {name: whole[name][i] for name in whole} for i, e in enumerate(history.epoch)]
    return (rows[-1] if rows else {}), rows


def _build_rest(model, spec) -> None:
    """Builds layers that only a user's `train_step` uses by tracing it; runs nothing."""
    layers = [layer for layer in keras_objects.layers_of(model, with_itself=False) if not layer.built]
    has_own_step = model_optimizers.is_own(model, "train_step") and not model_optimizers.is_own(model, "fit")
    if layers and not model.run_eagerly and has_own_step:
        tf.function(model.train_step).get_concrete_function(spec)


def _check_types(model, spec, do: str, fix: str) -> None:
    if not model_optimizers.decides_itself(model, do):  # its step may change what it gets
        inputs.check_types(model, keras.utils.unpack_x_y_sample_weight(spec)[0], fix)


def _check_shapes(model, spec, do: str) -> float:
    """Infers the shapes of outputs and loss. Returns the bytes of an output row, or 0 if unknown."""
    flat = tf.nest.flatten(spec)
    if model_optimizers.decides_itself(model, do):
        return 0.0  # its use of the data is unknown
    if not all(isinstance(leaf, tf.TensorSpec) for leaf in flat) or not model_optimizers.has_call(model):
        return 0.0

    def example(leaf):
        return keras.KerasTensor(
            (2, *(size or 1 for size in leaf.shape[1:])), keras.backend.standardize_dtype(leaf.dtype)
        )

    data = tf.nest.map_structure(example, spec)
    x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
    outputs = compute_output_spec(model, x, training=False)
    if do != "predict" and keras_objects.compiled_parts(model)[0] is not None:
        loss = functools.partial(keras_objects.step_loss, model)
        compute_output_spec(loss, x, y, outputs, sample_weight=weights, training=False)
    shapes = [output.shape[1:] for output in tree.flatten(outputs)]
    return 0.0 if any(None in shape for shape in shapes) else float(sum(np.prod(shape) * 4 for shape in shapes))


def _describe_spec(spec) -> str:
    names = ("x", "y", "sample_weight")
    parts = spec if isinstance(spec, tuple) else (spec,)

    def shown(part):
        described = lambda s: f"{tuple(s.shape)} {s.dtype.name}" if isinstance(s, tf.TensorSpec) else "lists"
        return tf.nest.map_structure(described, part)

    return ", ".join(f"{name} {shown(part)}" for name, part in zip(names, parts, strict=False))


def _explained(error: Exception) -> str:
    """Returns Keras's message; its cause follows a line that names the layer."""
    lines = [line.strip() for line in without_escapes(error).splitlines() if line.strip()]
    cause = (
        lines[1] if len(lines) > 1 and lines[0].startswith("Exception encountered when calling") else "".join(lines[:1])
    )
    return f"{type(error).__name__}: {cause[:500]}"
