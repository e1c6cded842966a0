"""Compares two workers with one process on the model of a `raytf.fit`, beside its start; see `train/verify`.

A process of its own does, as workers that stay from call to call have run TensorFlow. It leaves the processors to them.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections.abc import Mapping
from typing import Any

import ray

from raytf import timeouts
from raytf.data.stored import StoredDataset
from raytf.errors import in_a_line
from raytf.fitting import fit_worker
from raytf.fitting.fit_worker import FitDataset, Sending
from raytf.runtime.answers import collect
from raytf.runtime.processes import Process, start, threads, worker_environment
from raytf.train import verify
from raytf.train.entry import import_raytf

_NICE = 10
_MOST_BYTES = 64 << 20


class Proving:
    """A comparison that goes on in a thread, and in a process of the cluster.

    Args:
        scaling_config, run_config: of the workers.
        word: "warn" or "error".
        sending: the model, with its data.
        rows: what is trained and validated on, by name.
        blocks: the first block of each, of this process.
    """

    def __init__(
        self,
        scaling_config,
        run_config,
        word: str,
        sending: Sending,
        rows: Mapping[str, FitDataset],
        blocks: Mapping[str, StoredDataset],
    ):
        self._word, self._proof, self._told = word, None, False
        self._more = False
        few = {name: verify.few_rows(block) for name, block in blocks.items()}
        size = sum(getattr(value, "nbytes", 0) for value in sending.values.values())
        if few["train"] is None or size > _MOST_BYTES:
            self._proof = verify.Proof(skipped="one row" if few["train"] is None else f"{size >> 20} MiB of weights")
            self._thread = None
            return
        parts = {name: (rows[name].batch, rows[name].structure, found) for name, found in few.items() if found}
        arguments = scaling_config, run_config, sending, parts
        self._thread = threading.Thread(target=self._run, args=arguments, name="raytf_verify", daemon=True)
        self._thread.start()

    def look(self) -> None:
        """Warns of what was found, once it is known."""
        if self._proof is not None and not self._told:
            self._told = True
            verify.tell(self._proof, self._word)

    def wait(self, seconds: float, more: bool = False) -> None:
        """Waits for the outcome, and warns of what was found.

        Args:
            seconds: at most.
            more: whether the thread is to warn of it when it is known later.

        Raises:
            ConfigError: with "error", two workers do not train as one process does, or it is not known by then.
        """
        if self._thread is not None:
            self._thread.join(seconds)
        if self._proof is None and self._word == "error":
            self._proof = verify.Proof(failed=f"no end after {seconds:g} s")
        self._more = more
        self.look()
        if more and not self._told:
            atexit.register(self._give_up)

    def _give_up(self) -> None:
        """Says at the end of this process that nothing is known."""
        self._proof = self._proof or verify.NOT_IN_TIME
        self.look()

    def _run(self, scaling_config, run_config, sending: Sending, parts: dict) -> None:
        try:
            environment = worker_environment(run_config, scaling_config, threads(1) | {"CUDA_VISIBLE_DEVICES": "-1"})
            process = start(Process, ray.get_runtime_context().get_node_id(), environment, soft=True)
            try:
                importing, its = process.execute.remote(_import_nicely), timeouts.get()
                collect([importing], its.imports, "its imports", names=["a process"])
                call = process.execute.remote(timeouts.under, its, prove, sending, parts)
                (self._proof,) = collect([call], its.verify_error + 60, "its outcome", names=["a process"])
            finally:
                ray.kill(process)
        except Exception as error:
            self._proof = self._proof or verify.Proof(failed=in_a_line(error))
        if self._more:
            atexit.unregister(self._give_up)
            self.look()


def _import_nicely() -> None:
    os.nice(_NICE)
    import_raytf()


def prove(sending: Sending, parts: dict[str, tuple]) -> verify.Proof:
    """Compares two workers with one device, in a process that has run no TensorFlow.

    Args:
        sending: the model, with its data.
        parts: (its batch, its structure, what `verify.few_rows` gave) of "train", and of "validation" if there is one.
    """
    batch, structure, (rows, first) = parts["train"]
    its_batch, its_structure, validation = None, structure, None
    if "validation" in parts:
        its_batch, its_structure, (validation, _) = parts["validation"]

    def build() -> Any:
        from raytf.fitting import transport

        (model,), _ = transport.read(sending.data, sending.values)
        return model

    def trial():
        from raytf.fitting import transport
        from raytf.worker.verification import VerificationTask

        with contextlib.suppress(OSError):
            os.chdir(sending.folder)
        transport.apply_settings(sending.settings)
        return VerificationTask(
            build=build,
            batch=batch,
            rows=rows,
            validation=validation,
            global_batch=first,
            structure=lambda dataset: fit_worker.structured(dataset, structure),
            validation_batch=its_batch,
            validation_structure=lambda dataset: fit_worker.structured(dataset, its_structure),
        )

    proof = verify.outcome(verify.begin(trial), timeouts.get().verify_error)
    return proof or verify.Proof(failed=f"no end after {timeouts.get().verify_error:g} s")
