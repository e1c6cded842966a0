"""Proves a user's model before it trains: two workers against one device, on a few of the user's rows.

Forks of a process that has imported TensorFlow and run none of it make the runs, see `worker/verification`. Nothing
here imports TensorFlow: the process that asks may become a worker.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import pickle
import select
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import ray
from ray import cloudpickle

from raytf import logs, procfs, timeouts
from raytf.collectives import ring
from raytf.compat import autograph
from raytf.data import stored
from raytf.data.stored import StoredDataset
from raytf.data.tf_data import TFData
from raytf.errors import ConfigError, PeerLostError, in_a_line
from raytf.runtime.answers import NoAnswerError, collect

logger = logs.get_logger(__name__)

# Rows of both steps together, and of the first one: neither divides evenly between two workers.
_ROWS = (12, 7)
_LARGE_ROWS = (6, 3)
_LARGE_ROW_BYTES = 64 << 10
# Differences below these are rounding, relative to a value or to what the steps have changed of a weight.
_ROUNDING, _HALF_ROUNDING = 1e-5, 2e-2
# A difference is one if it exceeds so many times what other last bits, and other seeds, come to.
_TIMES = 30.0
# What the start of a training waits for: less than a second of two processors, on a busy machine until they gave it.
START_WAIT_CPU, START_WAIT = 1.6, 4.0
_LOOK_INTERVAL = 0.1
_NICE = 10
# Between two looks of the driver at a comparison that goes on, for its answer, and for its thread to end.
_POLL_INTERVAL = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Proof:
    """What came of a comparison.

    Args:
        differences: a sentence each; empty where two workers train as one device does.
        failed: why nothing could be compared, or None.
        skipped: why nothing was, on purpose, or None.
        random: what differs between two runs of one device as well, and says nothing.
    """

    differences: tuple[str, ...] = ()
    failed: str | None = None
    skipped: str | None = None
    random: tuple[str, ...] = ()

    def text(self) -> str:
        """What a user is told; "" where there is nothing to tell."""
        if self.failed is not None:
            return f"verify: whether two workers train this model as one process does is not known: {self.failed}"
        if not self.differences:
            return ""
        shown = "".join(f"\n  - {line}" for line in self.differences)
        return (
            "verify: two workers do not train this model as one process does, on a few of your rows in two steps:"
            f"{shown}\nPass verify=False to train all the same without this check, or verify='error' to refuse it."
        )

    def error(self) -> ConfigError:
        """The same for `verify="error"`."""
        return ConfigError(
            "With verify='error' several workers must train a model as one process does",
            "; ".join(self.differences) or f"no proof: {self.failed}",
            "Correct the model, or pass verify='warn' or verify=False",
        )


NOT_IN_TIME = Proof(failed="the training has ended first; verify='error' waits for it")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Order:
    """How two workers are to be compared with one device.

    Args:
        validation: a block of the validation's rows, or None.
        seconds, cpu_seconds: that the asking process waits for the outcome, see `outcome`.
        goes_on: whether the comparison goes on after that; else it is ended.
    """

    validation: StoredDataset | TFData | None = None
    seconds: float = START_WAIT
    cpu_seconds: float | None = START_WAIT_CPU
    goes_on: bool = False


@dataclasses.dataclass(frozen=True)
class Running:
    """A comparison that goes on beside this process.

    Args:
        pid: of the process that makes it.
        reader: a file descriptor of this process from which its `Proof` comes.
    """

    pid: int
    reader: int


def trial_of(pickled: bytes, block: StoredDataset | TFData, order: Order) -> Callable[[], Any] | Proof:
    """What makes the trial of a KerasTrainer's model, for `begin`.

    Args:
        pickled: (build_model, config, the `batch_spec.BatchSpec`, ...), by cloudpickle, see `dry_run.inspect`.
        block: a block of the training data, of this process.
        order: how the comparison is made.
    """
    found = few_rows(block)
    others = None if order.validation is None else few_rows(order.validation.here())

    def trial():
        from raytf.worker.verification import VerificationTask

        build_model, config, batch, *_ = cloudpickle.loads(pickled)
        return VerificationTask(
            build=lambda: build_model(dict(config)),
            batch=batch,
            rows=found[0],
            validation=None if others is None else others[0],
            global_batch=found[1],
        )

    return trial if found is not None else Proof(skipped="the data has one row")


def few_rows(block: StoredDataset | TFData) -> tuple[StoredDataset | TFData, int] | None:
    """(rows from all over a block, rows of the first step), None where two workers cannot have one each.

    Of a pipeline, whose rows are read there, itself.
    """
    if isinstance(block, TFData):
        return block, _ROWS[1]
    table = stored.as_table(block.get()[0])
    large = table.nbytes > _LARGE_ROW_BYTES * max(1, table.num_rows)
    wanted, first = _LARGE_ROWS if large else _ROWS
    count = min(wanted, table.num_rows)
    if count < 2:
        return None
    places = np.linspace(0, table.num_rows - 1, count).astype(int)
    rows = pa.concat_tables([table.slice(int(place), 1) for place in places])  # `take` knows not all kinds of columns
    return StoredDataset([rows], [count], block.columns), min(first, max(2, (count + 2) // 2))


# ------------------------------------------------------------------------------------------ the processes


def begin(trial: Callable[[], Any] | Proof) -> Running:
    """Starts a comparison in processes of their own, which end with this one.

    Args:
        trial: returns the `verification.VerificationTask`; called in each process that trains, as what is made of it
            may run TensorFlow. A `Proof` where there is nothing to try.
    """
    reader, writer = os.pipe()
    asking = os.getpid()
    pid = os.fork()
    if pid:
        os.close(writer)
        return Running(pid, reader)
    try:
        os.close(reader)
        os.setsid()
        os.nice(_NICE)
        quiet = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(quiet, stream)
        os.environ.update(CUDA_VISIBLE_DEVICES="-1", TF_CPP_MIN_LOG_LEVEL="3")
        try:
            with autograph.in_memory():
                said = trial if isinstance(trial, Proof) else _Supervisor(trial, asking).proof()
        except BaseException as error:
            said = Proof(failed=in_a_line(error))
        with os.fdopen(writer, "wb") as file:
            pickle.dump(said, file)
    finally:
        os._exit(0)


def outcome(running: Running, seconds: float, cpu_seconds: float | None = None) -> Proof | None:
    """The proof, or None if it goes on; then the same may be asked again.

    Args:
        running: from `begin`, in this process.
        seconds: to wait, at least 0.
        cpu_seconds: wait no longer than its processes take to compute so long, or None.
    """
    until, spent = time.monotonic() + seconds, procfs.cpu_seconds(running.pid)
    poll = select.poll()
    poll.register(running.reader, select.POLLIN)
    while not poll.poll(min(_LOOK_INTERVAL, max(0.0, until - time.monotonic())) * 1000):
        if time.monotonic() >= until:
            return None
        if cpu_seconds is not None and procfs.cpu_seconds(running.pid) - spent >= cpu_seconds:
            return None
    with os.fdopen(running.reader, "rb") as file:
        said = file.read()
    os.waitpid(running.pid, 0)
    return pickle.loads(said) if said else Proof(failed="its process was killed")


def cancel(running: Running) -> None:
    """Ends a comparison of which nobody wants to know any more."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(running.pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(running.pid, signal.SIGKILL)  # before it had a group of its own
    os.close(running.reader)
    os.waitpid(running.pid, 0)


# ------------------------------------------------------------------------------------------ at the driver


class Following:
    """Says what comes of a comparison that goes on in a process, when it is known: a context around the training.

    Args:
        running: the comparison; None where it is known, or none was made.
        processes: of which one was asked for it, a `processes.WarmPool`.
    """

    def __init__(self, running: Running | None, processes):
        self._running, self._processes, self._well = running, processes, False
        self._ends, self._thread = threading.Event(), threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> Following:
        if self._running is not None:
            self._thread.start()
        return self

    def __exit__(self, kind, error, traceback) -> None:
        self._well = kind is None
        self._ends.set()
        if self._running is not None:
            self._thread.join(timeouts.get().verify_end + timeouts.get().verify_parting)

    def _follow(self) -> None:
        proof, ended = None, False
        try:
            its = timeouts.get()
            while proof is None and not ended:
                ended = self._ends.wait(_POLL_INTERVAL)
                seconds = its.verify_end if ended and self._well else 0.0
                call = self._processes.asked.execute.remote(outcome, self._running, seconds)
                (proof,) = collect([call], seconds + its.verify_answer, "what came of verify", names=["a process"])
            proof = proof or NOT_IN_TIME
        except (ray.exceptions.RayError, NoAnswerError) as error:
            proof = NOT_IN_TIME if self._ends.is_set() else Proof(failed=f"its process has gone: {in_a_line(error)}")
        finally:
            self._processes.end_asked()
        if self._well or proof is not NOT_IN_TIME:
            tell(proof, "warn")


def tell(proof: Proof, word: str) -> None:
    """Warns of what a proof has found; says in a line that nothing is known.

    Args:
        proof: the outcome of a comparison.
        word: "warn" or "error".

    Raises:
        ConfigError: with "error", two workers do not train as one process does, or this is not known.
    """
    if word == "error" and (proof.differences or proof.failed is not None):
        raise proof.error()
    if proof.failed is not None:  # nothing is wrong with the model: no warning
        logger.info(proof.text())
    elif text := proof.text():
        warnings.warn(text, stacklevel=3)
    if proof.skipped is not None:
        logger.debug("verify: nothing was compared: %s", proof.skipped)
    if proof.random:
        logger.debug("verify: random in one process as well: %s", ", ".join(proof.random))


# ------------------------------------------------------------------------------------------ the runs

_PR_SET_PDEATHSIG = 1  # of Linux' prctl(2)


class _ComparisonLostError(Exception):
    """The process for which this is done has gone."""


@dataclasses.dataclass(frozen=True)
class ForkedTraining:
    """A process that trains, and the memory that it leaves its outcome in."""

    pid: int
    memory: int


class _Supervisor:
    """Has one device and two workers train, compares them, and has the one device train again where they differ.

    Args:
        trial: returns a `verification.VerificationTask`.
        asking: the process for which this is done.
    """

    def __init__(self, trial: Callable[[], Any], asking: int):
        self._trial, self._asking, self._eagerly = trial, asking, True
        self._until = time.monotonic() + timeouts.get().verify

    def proof(self) -> Proof:
        found = self._compared()
        if found.failed is not None and found.failed.startswith("one device"):
            self._eagerly = False  # it may be written for graphs alone
            return self._compared()
        return found

    def _compared(self) -> Proof:
        with local_addresses(2) as addresses:
            return self._compared_at(addresses)

    def _compared_at(self, addresses: list[str]) -> Proof:
        initial = os.memfd_create("initial")
        shared, tells = os.pipe()
        token = ring.new_token()

        def share(values: list) -> None:
            with os.fdopen(os.dup(initial), "wb") as file:
                pickle.dump(values, file, protocol=5)
            os.write(tells, b"1")

        def taken() -> list:
            os.close(tells)
            if not os.read(shared, 1):
                raise PeerLostError(0, "the worker whose weights it was to begin with has failed")
            return read_memory(initial)

        def worker(rank: int):
            from raytf.worker import verification

            return verification.as_worker(self._trial(), self._eagerly, rank, addresses, token, share)

        def device(initial_values: Callable[[], list], again: bool = False):
            from raytf.worker import verification

            return verification.on_one_device(self._trial(), self._eagerly, initial_values, again)

        runs = [
            start_run(lambda: worker(0)),
            start_run(lambda: worker(1)),
            start_run(lambda: device(taken)),
        ]
        os.close(tells)
        two, other, one = self._ended(runs)
        if (done := _unable(one, two, other)) is not None:
            return done
        suspects = suspected(one, two)
        alike = two["digest"] == other["digest"]
        if not suspects and alike:
            return Proof()
        (again,) = self._ended([start_run(lambda: device(lambda: read_memory(initial), again=True))])
        if "error" in again:
            return Proof(failed=f"one device could not train a second time: {again['error']}")
        return judged(one, two, again, suspects, alike)

    def _ended(self, runs: Sequence[ForkedTraining]) -> list[dict]:
        """What each has left; all are ended where the time is over, or nobody wants to know."""
        left = {os.pidfd_open(run.pid): run for run in runs}
        poll = select.poll()
        for one in left:
            poll.register(one, select.POLLIN)
        try:
            while left:
                for one, _ in poll.poll(_LOOK_INTERVAL * 5000):
                    poll.unregister(one)
                    os.waitpid(left.pop(one).pid, 0)
                    os.close(one)
                if os.getppid() != self._asking:
                    raise _ComparisonLostError
                if left and time.monotonic() > self._until:
                    raise TimeoutError(f"no end after {timeouts.get().verify:g} s")
        finally:
            for run in left.values():
                os.kill(run.pid, signal.SIGKILL)
                os.waitpid(run.pid, 0)
        return [read_memory(run.memory) or {"error": "its process was killed"} for run in runs]


@contextlib.contextmanager
def local_addresses(count: int) -> Iterator[list[str]]:
    """Addresses of this host alone that nothing else takes meanwhile, for workers in forks of this process."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(("127.0.0.1", 0))
        yield [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]


def start_run(work: Callable[[], dict]) -> ForkedTraining:
    """Starts a fork of this process that calls `work`, and leaves what that returns, or raises, in a memory.

    It ends with this process: Ray kills the children of a worker that it ends, and not theirs.
    """
    memory, parent = os.memfd_create("outcome"), os.getpid()
    pid = os.fork()
    if pid:
        return ForkedTraining(pid, memory)
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it has ended before that
            os._exit(1)
        try:
            said = work()
        except BaseException as error:
            said = {"error": in_a_line(error), "lost": isinstance(error, (PeerLostError, TimeoutError))}
        with os.fdopen(memory, "wb") as file:
            pickle.dump(said, file, protocol=5)
    finally:
        os._exit(0)


def read_memory(memory: int) -> Any:
    """What another process has written into a memory, None where it has written nothing."""
    with os.fdopen(os.dup(memory), "rb") as file:
        file.seek(0)
        return pickle.load(file) if os.fstat(memory).st_size else None


def _unable(one: dict, two: dict, other: dict) -> Proof | None:
    """Why nothing can be compared, or what failed on two workers alone."""
    skipped = next((each["skipped"] for each in (one, two, other) if "skipped" in each), None)
    if skipped is not None:
        return Proof(skipped=skipped)
    failures = [each for each in (two, other) if "error" in each]
    causes = [each for each in failures if not each.get("lost")]
    if "error" in one and not one.get("lost"):
        return Proof(failed=f"one device fails on them: {one['error']}")
    if causes and "error" not in one:
        return Proof(differences=(f"a step fails on two workers, and not on one device: {causes[0]['error']}",))
    if failures or "error" in one:
        return Proof(failed=(causes or failures or [one])[0]["error"])
    return None


# ------------------------------------------------------------------------------------------ the comparison


@dataclasses.dataclass(frozen=True)
class _Gap:
    """How far two runs are apart in one thing.

    Args:
        kind: "log", "weight" or "state".
        gap, scale: the difference, and what it is to be seen against.
        shown: of the values.
        how: how the variable is aggregated, of a state.
    """

    kind: str
    gap: float
    scale: float
    shown: str
    how: str = ""


def _gaps(one: Mapping[str, Any], two: Mapping[str, Any]) -> dict[str, _Gap]:
    found = {}
    for name in [*one["logs"], *(name for name in two["logs"] if name not in one["logs"])]:
        if name not in one["logs"] or name not in two["logs"]:
            found[f"log {name}"] = _Gap("log", np.inf, 1.0, "there on one of them alone")
            continue
        a, b = (np.asarray(each["logs"][name], np.float64) for each in (one, two))
        shown = f"{a.ravel()[0]:.6g} on one device, {b.ravel()[0]:.6g} on two workers" if a.size else ""
        found[f"log {name}"] = _Gap("log", _most(a - b, a, b), float(np.max(np.abs(a), initial=1e-6)), shown)
    for (path, was, mine), (_, _, its) in zip(one["weights"], two["weights"], strict=True):
        was, mine, its = (np.asarray(value, np.float64) for value in (was, mine, its))
        moved, apart = _norm(mine - was), _norm(np.where(np.isnan(mine) & np.isnan(its), 0, mine - its))
        floor = 8 * np.finfo(np.float32).eps * _norm(mine) / _ROUNDING
        shown = f"apart by {apart / max(moved, 1e-30):.2g} times what the two steps change"
        found[f"weight {path}"] = _Gap("weight", apart, moved + floor, shown)
    for (path, mine, how), (_, its, _) in zip(one["states"], two["states"], strict=True):
        a, b = np.asarray(mine, np.float64), np.asarray(its, np.float64)
        shown = f"{a.ravel()[0]:.6g} on one device, {b.ravel()[0]:.6g} on two workers" if a.size else ""
        found[f"state {path}"] = _Gap("state", _most(a - b, a, b), float(np.max(np.abs(a), initial=1e-6)), shown, how)
    return found


def _norm(values: np.ndarray) -> float:
    return float(np.sqrt(np.sum(np.square(values))))


def _most(gap: np.ndarray, a: np.ndarray, b: np.ndarray) -> float:
    """The largest difference; none between two that are no numbers."""
    gap = np.where((np.isnan(a) & np.isnan(b)) | (a == b), 0.0, np.abs(gap))
    return float(np.max(np.where(np.isnan(gap), np.inf, gap), initial=0.0))


def suspected(one: Mapping[str, Any], two: Mapping[str, Any]) -> list[str]:
    """What differs by more than rounding comes to in most models."""
    most = _HALF_ROUNDING if one["half"] else _ROUNDING
    return [name for name, its in _gaps(one, two).items() if not its.gap <= most * its.scale]


def judged(one: dict, two: dict, again: dict, suspects: Sequence[str], alike: bool) -> Proof:
    """Which suspects differ by more than what one device makes of other last bits and other seeds.

    Args:
        one, two: outcomes on one device and on two workers.
        again: on one device, with other last bits and seeds.
        suspects: from `suspected`.
        alike: whether both workers have the same weights.
    """
    gaps, noise = _gaps(one, two), _gaps(one, again)
    real = [name for name in suspects if gaps[name].gap > _TIMES * noise[name].gap]
    random = tuple(name for name in suspects if name not in real)
    traits, found = one["traits"], []
    if not alike:
        found.append(
            "the two workers have other weights than each other after two steps: a step draws numbers or reads a clock "
            "that seeds do not set, or changes weights without an optimizer. Let the optimizer change them"
        )
    logs = [name for name in real if gaps[name].kind == "log"]
    weights = [name for name in real if gaps[name].kind == "weight"]
    found += [_of_state(name, gaps[name]) for name in real if gaps[name].kind == "state"]
    if weights:
        found.append(_of_weights(weights, gaps, traits))
    found += [_of_log(name.removeprefix("log "), gaps[name], traits, bool(weights)) for name in logs]
    return Proof(differences=tuple(found), random=random)


def _of_state(name: str, its: _Gap) -> str:
    path = name.removeprefix("state ")
    why = (
        "each worker counts or averages its own rows"
        if its.how in ("none", "only_first_replica")
        else f"its aggregation is {its.how!r}"
    )
    return (
        f"{path}, a variable that is not trained: {its.shown}; {why}. Say how workers join it: "
        "add_weight(..., aggregation='sum') for what is counted, aggregation='mean' for what is averaged"
    )


def _of_weights(names: Sequence[str], gaps: Mapping[str, _Gap], traits: Mapping[str, Any]) -> str:
    worst = max(names, key=lambda name: gaps[name].gap / gaps[name].scale)
    some = (
        "all weights"
        if len(names) == len([g for g in gaps.values() if g.kind == "weight"])
        else (f"{len(names)} weight(s)")
    )
    return f"{some}, most of all {worst.removeprefix('weight ')}: {gaps[worst].shown}; {_why_weights(traits)}"


def _why_weights(traits: Mapping[str, Any]) -> str:
    methods = traits["methods"]
    if traits["python"]:
        return (
            f"steps change {', '.join(traits['python'])} in Python, which each worker has for itself, of its own rows. "
            "Keep it in a variable: add_weight(..., trainable=False, aggregation='sum' or 'mean')"
        )
    if "train_step" in methods:
        return (
            f"train_step ({methods['train_step']}) makes something of its own worker's rows, as a mean by tf.shape is. "
            "Take the loss from self.compute_loss(x, y, y_pred), and leave clipping to the optimizer"
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


def _of_log(name: str, its: _Gap, traits: Mapping[str, Any], weights: bool) -> str:
    bare, methods = name.removeprefix("val_"), traits["methods"]
    step = "test_step" if name.startswith("val_") else "train_step"
    for metric, own, is_function in traits["metrics"]:
        if metric == bare and is_function:
            why = (
                f"{own} is a function that reduces its batch, of which workers' values are averaged. Make it a "
                "keras.metrics.Metric that keeps sums, and divides them in result()"
            )
            return f"the metric {name}: {its.shown}; {why}"
        if metric == bare:
            why = f"{own} keeps what does not add up over workers. Let its variables be sums over rows"
            return f"the metric {name}: {its.shown}; {why}"
    if step in methods:
        why = (
            f"{step} ({methods[step]}) returns a value of its own worker's rows. Give the value to a "
            "keras.metrics.Mean, with the number of rows as its sample_weight, and return its result()"
        )
    elif "compute_loss" in methods and bare == "loss":
        why = f"compute_loss ({methods['compute_loss']}) gives a value of its own worker's rows"
    else:
        why = "as the weights differ" if weights else "its value is not the one of all rows"
    return f"the log {name}: {its.shown}; {why}"
