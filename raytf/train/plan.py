"""Predicts the needs of a training before it runs: strategy, batches, traffic and memory. Driver side."""

from __future__ import annotations

import copy
import dataclasses
import math

import ray

from raytf import validation
from raytf.console import phases as phases_module
from raytf.data import ingest, partitions, stored, streamed
from raytf.data.tf_data import TFData
from raytf.errors import ResourceError
from raytf.runtime import networks, resources
from raytf.runtime.processes import Process, WarmPool
from raytf.runtime.topology import per_replica_batch, pick_strategy
from raytf.train import arguments
from raytf.train.dry_run import ModelFacts
from raytf.train.entry import import_raytf
from raytf.train.keras_trainer import KerasTrainer
from raytf.train.prepare import Prepared, place_workers

# At the start of `fit` the chief broadcasts its variables, in groups of about this many bytes, or one larger variable.
# A worker holds three copies of a group: old, received, and TensorFlow's. It also holds seven copies of a message
# (`communicator.broadcast_from_chief`). Measured with 183 MiB of weights and slots: 65 to 76 MiB in 4 MiB variables,
# and 73 to 120 MiB with one of 61 MiB, with equal variables on all workers.
_GROUP_BYTES, _GROUP_COPIES, _TRAVELLING_BYTES = 16 << 20, 3, 7 * (4 << 20)
# Share of a worker's memory; the remaining part is for activations, the feed and TensorFlow itself.
_MEMORY_FRACTION = 0.8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The result of `raytf.plan`: what a `KerasTrainer` will do.

    Args:
        strategy: Name of the strategy.
        why: Reason for it, as a clause.
        workers: Number of processes that train.
        devices: Number of replicas in each.
        num_ps: Number of parameter servers.
        per_replica_batch: Rows of a full step on each replica: the different numbers, the largest first.
        steps_per_epoch: Number of steps of an epoch, or None for a pipeline whose batches are counted at the start.
        last_batch: Rows of an epoch's last step.
        parameters: Number of trainable parameters.
        weight_bytes: Bytes of weights on each device.
        optimizer_bytes: Bytes of the optimizer's state on each device; with parameter servers on these and the
            coordinator.
        gradient_bytes: Bytes of gradients on each device.
        start_bytes: Bytes of copies that several workers hold at the start of `fit`, before there are gradients.
        wire_bytes: Bytes that a worker sends in a step, on average.
        row_bytes: Bytes of a row of the data, as the model gets it.
        step_seconds: Seconds of one replica's part of a step without communication, as measured on one core; None if
            not measured.
        room_bytes: Bytes of memory of a worker, or None if unknown.
        data: Tuple with a line for each pipeline.
        networks: Network interface on which workers of each node exchange, None if unknown, by the node's address;
            empty without exchange.
    """

    strategy: str
    why: str
    workers: int
    devices: int
    num_ps: int
    per_replica_batch: tuple[int, ...]
    steps_per_epoch: int | None
    last_batch: int
    parameters: int
    weight_bytes: int
    optimizer_bytes: int
    gradient_bytes: int
    start_bytes: int
    wire_bytes: float
    row_bytes: float
    step_seconds: float | None
    room_bytes: float | None
    data: tuple[str, ...] = ()
    networks: dict[str, str | None] = dataclasses.field(default_factory=dict)

    @property
    def memory_bytes(self) -> int:
        """Returns the bytes of weights, gradients and optimizer's slots on each device.

        If the start of `fit` needs more than the gradients, that counts. Parameter servers hold the slots.
        """
        passing = max(self.gradient_bytes, self.start_bytes)
        return self.weight_bytes + passing + (0 if self.num_ps else self.optimizer_bytes)

    @property
    def server_bytes(self) -> float:
        """Returns the bytes on each parameter server, if all hold the same share."""
        return (self.weight_bytes + self.optimizer_bytes) / self.num_ps if self.num_ps else 0.0

    @property
    def rows_per_second(self) -> float | None:
        """Returns the rows per second of a worker's replicas without any wait for input or communication."""
        return None if self.step_seconds is None else self.per_replica_batch[0] * self.devices / self.step_seconds

    def lines(self) -> list[tuple[str, str]]:
        """Returns the lines of the report: (name, value)."""
        batch = sorted(set(self.per_replica_batch), reverse=True)
        shown = [
            ("strategy", f"{self.strategy}: {self.why}"),
            ("workers", f"{self.workers}, {self.devices} device(s) each" + self._servers()),
            ("rows of a step on a replica", " or ".join(map(str, batch))),
            ("steps of an epoch", self._steps()),
            ("parameters", f"{self.parameters:,}"),
            ("memory on each device", f"{self._memory()} and activations"),
            *([("memory on each server", f"about {_bytes(self.server_bytes)}")] if self.num_ps else []),
            ("sent by a worker in a step", _bytes(self.wire_bytes) if self.wire_bytes else "nothing"),
            *(("network", line) for line in networks.interface_lines(self.networks)),
            ("row of the data", _bytes(self.row_bytes)),
            *(("data", line) for line in self.data),
        ]
        if self.rows_per_second is not None:
            rate = self.rows_per_second
            shown.append(("input at most", f"{rate:,.0f} rows/s, {_bytes(rate * self.row_bytes)}/s a worker"))
            if self.wire_bytes:
                network = self.wire_bytes / self.step_seconds
                shown.append(("network at most", f"{_bytes(network)}/s a worker"))
        return shown

    def _servers(self) -> str:
        return f"; {self.num_ps} parameter server(s) and a coordinator" if self.num_ps else ""

    def _steps(self) -> str:
        if self.steps_per_epoch is None:
            return "counted when the workers start"
        whole = self.last_batch == sum(self.per_replica_batch)
        return f"{self.steps_per_epoch:,}" + ("" if whole else f", the last with {self.last_batch} rows")

    def _memory(self) -> str:
        parts = {"weights": self.weight_bytes, "optimizer": self.optimizer_bytes, "gradients": self.gradient_bytes}
        if self.start_bytes > self.gradient_bytes:
            del parts["gradients"]
            parts["copies at the start, more than gradients,"] = self.start_bytes
        if self.num_ps:
            del parts["optimizer"]
        return f"{_bytes(self.memory_bytes)} (" + ", ".join(f"{k} {_bytes(v)}" for k, v in parts.items()) + ")"


def plan(trainer: KerasTrainer) -> Plan:
    """Returns what a `KerasTrainer` will do, without training: builds its model and reads the first rows of its data.

    Args:
        trainer: A `raytf.KerasTrainer`.

    Returns:
        A `Plan`: workers, batches, memory, traffic and times. Its `step_seconds` are measured on one core of the
        cluster.

    Raises:
        ConfigError: `trainer.fit` would raise it.
        ResourceError: The workers do not fit into the cluster, or the model does not fit into a worker's memory.

    Example:
        >>> import keras, pandas, ray, raytf
        >>> def build_model(config):
        ...     model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        ...     model.compile("sgd", "mse")
        ...     return model
        >>> rows = ray.data.from_pandas(pandas.DataFrame({"x": range(64), "y": range(64)}))
        >>> trainer = raytf.KerasTrainer(build_model, datasets={"train": rows}, features="x", labels="y")
        >>> raytf.plan(trainer).parameters
        2
    """
    fix = "Pass the trainer itself"
    validation.check_kind("trainer", trainer, KerasTrainer, "a raytf.KerasTrainer", fix, optional=False)
    trainer = copy.copy(trainer)
    with phases_module.show_phases(trainer.progress, phases_module.starting_phase(), only_in_terminals=True) as phases:
        return _plan(trainer, phases)


def _plan(trainer: KerasTrainer, phases: phases_module.Phases) -> Plan:
    inner = place_workers(trainer)
    phases.begin(phases_module.TRYING)
    scaling = trainer.scaling_config
    with Prepared(WarmPool(Process, inner, trainer.run_config, 1, import_raytf)) as training:
        sources = {name: _first(name, dataset, trainer) for name, dataset in trainer.datasets.items()}
        devices = arguments.devices(scaling)
        workers = arguments.check_workers(scaling)
        replicas = 1 if trainer.num_ps else workers * devices
        batch = per_replica_batch(trainer.config["batch_size"], replicas)
        facts = trainer._try_model(training.processes, sources, trainer.config, batch[0]).facts
        rows = _rows(trainer, sources["train"])
    name = pick_strategy(trainer.strategy, workers=workers, devices=devices, tpu=bool(scaling.use_tpu))
    sent = wire_bytes(facts, name, workers, trainer.tensorflow_config)
    interfaces = resources.interfaces(scaling, trainer.tensorflow_config.network) if sent else {}
    result = Plan(
        strategy="one process" if name == "default" else name,
        why=_why(trainer.strategy, name, workers, devices),
        workers=workers,
        devices=devices,
        num_ps=trainer.num_ps,
        per_replica_batch=batch,
        steps_per_epoch=None if rows is None else -(-rows // trainer.config["batch_size"]),
        last_batch=(rows or 0) % trainer.config["batch_size"] or trainer.config["batch_size"],
        data=tuple(ingest.describe(name, source, "") for name, source in sources.items() if isinstance(source, TFData)),
        parameters=facts.parameters,
        weight_bytes=facts.weight_bytes,
        optimizer_bytes=optimizer_bytes(facts, name, workers, trainer.tensorflow_config),
        gradient_bytes=facts.gradient_bytes,
        start_bytes=start_bytes(facts, name, workers),
        wire_bytes=sent,
        networks={node: interface for node, (interface, _) in interfaces.items()},
        row_bytes=facts.row_bytes,
        step_seconds=facts.step_seconds,
        room_bytes=_room(scaling, workers),
    )
    if result.room_bytes is not None and result.memory_bytes > _MEMORY_FRACTION * result.room_bytes:
        raise ResourceError(
            "Weights, gradients and optimizer must fit into a worker's memory, with room for activations",
            f"{_bytes(result.memory_bytes)} for workers that have {_bytes(result.room_bytes)} each",
            "Use a smaller model or an optimizer with fewer slots, fewer workers on a node, or more memory",
        )
    return result


def _rows(trainer: KerasTrainer, dataset: stored.StoredDataset | TFData) -> int | None:
    """Returns the rows of an epoch; for a pipeline those of its steps if known, as full batches."""
    if isinstance(dataset, TFData):
        return None if dataset.facts.steps is None else dataset.facts.steps * trainer.config["batch_size"]
    with stored.quiet(), streamed.log_slow_reads("train"):
        return trainer.datasets["train"].count()


def _first(name: str, dataset, trainer) -> stored.StoredDataset | TFData:
    if isinstance(dataset, TFData):
        return dataset
    with streamed.log_slow_reads(name):
        if ingest.materialized(trainer.materialize, name) is False:
            with stored.quiet():
                partitions.divide(dataset)  # raises ConfigError for a dataset that cannot be streamed
        return stored.first(dataset, trainer.batch.roles, partitions.unbound)


def start_bytes(facts: ModelFacts, strategy: str, workers: int) -> int:
    """Returns the bytes of a worker's copies during the broadcast of the chief's variables; see `Plan.start_bytes`."""
    if strategy != "multi_worker_mirrored" or workers == 1:
        return 0
    everything = facts.weight_bytes + facts.optimizer_bytes
    group = max(facts.largest_bytes, min(_GROUP_BYTES, everything))
    return _GROUP_COPIES * group + min(_TRAVELLING_BYTES, 7 * everything)


def optimizer_bytes(facts: ModelFacts, strategy: str, workers: int, config) -> int:
    """Returns the bytes of the optimizer's state on a device: with `shard_optimizer` a share, and all for tables."""
    if not config.shard_optimizer or strategy != "multi_worker_mirrored":
        return facts.optimizer_bytes
    return facts.table_slot_bytes + -(-(facts.optimizer_bytes - facts.table_slot_bytes) // workers)


def wire_bytes(facts: ModelFacts, strategy: str, workers: int, config) -> float:
    """Returns the bytes that a worker sends in a step, on average.

    A ring all-reduce over n processes sends 2 (n - 1) / n of the summed bytes (P. Patarasuk and X. Yuan, "Bandwidth
    optimal all-reduce algorithms for clusters of workstations", 2009). A worker sends sparse rows to all others.
    """
    if strategy == "parameter_server":
        return float(facts.gradient_bytes + facts.sparse_bytes)
    if strategy != "multi_worker_mirrored" or workers == 1:
        return 0.0
    if config.sync_every > 1:
        return 2 * (workers - 1) / workers * facts.weight_bytes / config.sync_every
    size = facts.gradient_bytes * (0.5 if config.gradient_dtype and facts.wide_gradients else 1.0)
    return 2 * (workers - 1) / workers * size + (workers - 1) * facts.sparse_bytes


def _why(given: str, name: str, workers: int, devices: int) -> str:
    if given != "auto":
        return "as requested"
    reasons = {
        "multi_worker_mirrored": f"{workers} workers train in step",
        "mirrored": f"one worker with {devices} devices",
        "tpu": "the workers hold TPUs",
        "default": "one worker with one device needs none",
    }
    return reasons[name]


def _room(scaling_config, workers: int) -> float | None:
    """Returns the bytes of memory of a worker: its request, or its share of the smallest node that fits it."""
    needed = resources.resources_per_worker(scaling_config)
    if "memory" in needed:
        return needed["memory"]
    nodes = [
        node["Resources"]
        for node in ray.nodes()
        if node["Alive"] and resources.count_fitting([node["Resources"]], needed)
    ]
    if not nodes or needed.get("GPU"):
        return None
    return min(node["memory"] / min(workers, resources.count_fitting([node], needed)) for node in nodes)


def _bytes(count: float) -> str:
    unit = min(4, int(math.log(max(count, 1), 1024)))
    return f"{count / 1024**unit:.{0 if unit == 0 else 1}f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[unit]}"
