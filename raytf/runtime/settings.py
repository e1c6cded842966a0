"""How the workers' TensorFlow is set up: values and their ranges."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from raytf import timeouts
from raytf.errors import ConfigError
from raytf.timeouts import Timeouts

_IMPLEMENTATIONS = ("auto", "ring", "nccl")
_WIRE_DTYPES = (None, "bfloat16", "float16")
# First and last: below the range that Linux hands out for outgoing connections, above the ports of Ray's own workers.
PORTS = (20_000, 31_999)
# Coordinator and servers wait for each other in several operations at once: on two cores, TensorFlow's default of two
# threads hung, and six ran.
SERVER_THREADS = 8
# Until all workers have made a step, as graphs are compiled meanwhile.
FIRST_STEP_TIMEOUT = 300.0


@dataclass(frozen=True, kw_only=True)
class TensorflowConfig:
    """How the workers' TensorFlow is set up.

    Args:
        communication: how gradients are summed between workers: "ring" and "nccl" are TensorFlow's own (its ring over
            gRPC, on any device; NCCL, on GPUs); "auto" takes raytf's ring of sockets where workers compute on one CPU
            device each, and lets TensorFlow choose elsewhere.
        gradient_dtype: "bfloat16" or "float16": floating type in which wider gradients travel over raytf's ring, half
            the bytes at the price of a rounding for each worker, and "float16" with a scale for each 2046 numbers;
            None sends them as they are.
        sync_every: steps that each worker makes by itself, on its own rows, before parameters are averaged: less
            traffic for slow networks, and other results than one process has. 1 sums the gradients of each step.
        timeout_s: seconds after which a collective that a peer does not join fails; None waits for ever.
        hang_timeout_s: seconds after which it is said which worker others wait for, what it does instead, and its
            Python stack; or 30 times what a step takes usually, if that is more. Three times as long, and the run ends;
            30 times in a callback, an input or a checkpoint, which may just be slow, where the worker still moves, or
            where it is not waited for in an exchange. A process
            that is stopped is ended within it, and one that computes never is. At least 2; None says nothing.
        heal: where FailureConfig allows failures: a worker of a KerasTrainer, or of a trial of its sweep, that is lost
            within a step, and whose gradients are summed in raytf's ring, is replaced while the others keep their
            processes and go on in that step. Each worker passes on what it has for itself (metrics, moving statistics,
            seeds) after each step. Where it cannot be done, and with False, all workers start anew from the last
            checkpoint.
        spares: processes that stand ready to take the place of a lost worker of a KerasTrainer, on each host that has
            workers; one that was used is followed by another. Each has imported TensorFlow, and has made a training
            step of the model on the first rows, which is thrown away. For that it calls `build_model`, and traces
            `map` and `train_step`, once more than a training does, as the last of the workers but outside of Ray
            Train's context; no callback is called, and nothing is reported. Where that fails it is said, and the
            process has imported TensorFlow alone. It takes memory (0.7 GB resident, and the model) and no CPU of the
            cluster. 0: a process starts when a worker is lost, which takes longer. It needs `heal`, failures that
            FailureConfig allows, and workers that are healed: at least two, more than spares, on CPUs, with
            communication="auto" and without sync_every.
        first_step_timeout_s: the same until all workers have made a step, as they compile meanwhile.
        bytes_per_pack: gradients are sent in packs of about this many bytes; 0 takes 4 MiB in raytf's ring, and one
            pack in TensorFlow's.
        intra_op_threads: threads within one operation; None takes the CPUs that Ray gave the worker.
        inter_op_threads: operations that run at the same time; None takes as many, and at least two.
        pin_cpus: "auto": where a host has enough cores for all workers of the run there, each worker has as many of its
            own as Ray gave it CPUs, which no other worker has, not of another run either; see `raytf/runtime/cores.py`.
            Cores of a host that no worker has claimed may be used by each of them, as threads that read or decode rows
            would else wait beside idle ones. So it acts most where workers take up the host, as Linux may put two that
            talk on one core while another idles. Processes that write checkpoints are not bound. Nothing happens
            outside Linux, on hosts with more workers than cores, for workers of less than one CPU, and with parameter
            servers. False, the default, leaves all to Linux: other programs may be busy on a core, and a worker that
            keeps to it cannot leave.
        memory_growth: take GPU memory as it is needed, not all of it at the start.
        renew_worker_mb: megabytes (10^6 bytes) by which the resident memory of a worker that stays between trials of a
            sweep, or between calls of `raytf.fit`, may grow after its first trial or call. Where it has grown by more,
            all workers of its group end and new ones take the next trial or call; a line says so. At least 1; None: no
            limit. TensorFlow and Keras may keep parts of graphs that were traced (keras issues 20552 and 21090).
        ports: the first and the last port on which workers listen, for raytf's ring or TensorFlow: at least one a
            worker of a host. None of them is for anybody else; see `docs/guides/cluster.md`.
        legacy_keras: for a TensorflowTrainer: Keras 2 (the package tf_keras) as `tf.keras` of the workers, and nothing
            of what raytf does for Keras 3, as under Ray's own TensorflowTrainer. TF_USE_LEGACY_KERAS=1 in the driver's
            environment, or in a runtime environment of Ray, asks for it, too.
        seed: workers that shuffle unseeded tf.data pipelines shuffle them alike; None draws one seed for the run.

    Raises:
        ConfigError: a value outside its range.
    """

    communication: str = "auto"
    gradient_dtype: str | None = None
    sync_every: int = 1
    timeout_s: float | None = None
    hang_timeout_s: float | None = 10.0
    first_step_timeout_s: float = FIRST_STEP_TIMEOUT
    heal: bool = True
    spares: int = 0
    bytes_per_pack: int = 0
    intra_op_threads: int | None = None
    inter_op_threads: int | None = None
    pin_cpus: Literal["auto", False] = False
    memory_growth: bool = True
    renew_worker_mb: float | None = 4000.0
    ports: tuple[int, int] = PORTS
    seed: int | None = None
    legacy_keras: bool = False

    def __post_init__(self):
        if self.communication not in _IMPLEMENTATIONS:
            raise ConfigError(
                f"communication must be one of {', '.join(_IMPLEMENTATIONS)}", repr(self.communication), "Choose one"
            )
        if self.gradient_dtype not in _WIRE_DTYPES:
            raise ConfigError(
                "gradient_dtype must be bfloat16, float16 or None", repr(self.gradient_dtype), "Choose one of them"
            )
        if self.gradient_dtype is not None and self.communication != "auto":
            raise ConfigError(
                "gradient_dtype needs raytf's ring of sockets",
                f"gradient_dtype={self.gradient_dtype!r} with communication={self.communication!r}",
                'Use communication="auto"',
            )
        if isinstance(self.sync_every, bool) or not isinstance(self.sync_every, int) or self.sync_every < 1:
            raise ConfigError("sync_every must be a number of steps, at least 1", repr(self.sync_every), "Raise it")
        if self.sync_every > 1 and self.gradient_dtype is not None:
            raise ConfigError(
                "gradient_dtype is for gradients that travel, and with sync_every parameters do",
                f"gradient_dtype={self.gradient_dtype!r} with sync_every={self.sync_every}",
                "Leave one of them out",
            )
        if self.legacy_keras and (self.gradient_dtype is not None or self.sync_every > 1):
            raise ConfigError(
                "gradient_dtype and sync_every are for Keras 3",
                f"gradient_dtype={self.gradient_dtype!r}, sync_every={self.sync_every} with legacy_keras=True",
                "Leave them out, or use Keras 3",
            )
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise ConfigError("timeout_s must be more than 0 seconds, or None", self.timeout_s, "Raise it")
        if self.hang_timeout_s is not None and not self.hang_timeout_s >= 2:
            raise ConfigError("hang_timeout_s must be at least 2 seconds, or None", self.hang_timeout_s, "Raise it")
        if not self.first_step_timeout_s >= (self.hang_timeout_s or 2):
            raise ConfigError(
                "first_step_timeout_s must be at least hang_timeout_s, as graphs are compiled in the first step",
                self.first_step_timeout_s,
                "Raise it",
            )
        if isinstance(self.spares, bool) or not isinstance(self.spares, int) or self.spares < 0:
            raise ConfigError("spares must be a number of processes, at least 0", repr(self.spares), "Use such a one")
        if self.spares and (not self.heal or self.communication != "auto" or self.sync_every > 1):
            raise ConfigError(
                "spares replace lost workers in place, which needs heal=True",
                f"spares={self.spares} with heal={self.heal}, communication={self.communication!r}, "
                f"sync_every={self.sync_every}",
                'Leave spares out, or use heal=True, communication="auto" and sync_every=1',
            )
        if self.pin_cpus != "auto" and self.pin_cpus is not False:
            raise ConfigError('pin_cpus must be "auto" or False', repr(self.pin_cpus), "Choose one of them")
        if self.bytes_per_pack < 0:
            raise ConfigError("bytes_per_pack must be at least 0", self.bytes_per_pack, "Use 0 for one pack")
        if self.renew_worker_mb is not None and not self.renew_worker_mb >= 1:
            raise ConfigError("renew_worker_mb must be at least 1 megabyte, or None", self.renew_worker_mb, "Raise it")
        check_ports(self.ports)
        for name in ("intra_op_threads", "inter_op_threads"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, or None", getattr(self, name), "Raise it")


@dataclass(frozen=True, kw_only=True)
class WorkerSetup:
    """What a driver tells the processes of its workers, whatever they train.

    Args:
        config: the user's.
        strategy: what `raytf.get_strategy()` builds.
        tpu: the workers hold TPUs.
        datasets: a TensorflowTrainer's by name, for `raytf.get_dataset`.
        servers: the `servers.ServerSpec` of a ParameterServerStrategy.
        warned: where warnings are claimed by the worker that shows them, a `progress.Entries`.
        board: where the chief says how far a `fit` of a train loop is, a `progress.Board`.
        log_level: from which on Ray Train's own lines are shown.
        timeouts: those of the driver.
    """

    config: TensorflowConfig = field(default_factory=TensorflowConfig)
    strategy: str = "auto"
    tpu: bool = False
    datasets: Any = field(default=None, repr=False)
    servers: Any = field(default=None, repr=False)
    warned: Any = field(default=None, repr=False)
    board: Any = field(default=None, repr=False)
    log_level: str = field(default="WARNING", repr=False)
    timeouts: Timeouts = field(default_factory=timeouts.get)


def check_ports(ports: tuple[int, int]) -> None:
    """Raises ConfigError unless `ports` are the first and the last of a range that any process may listen on."""
    whole = isinstance(ports, (tuple, list)) and all(isinstance(p, int) and not isinstance(p, bool) for p in ports)
    if not whole or len(ports) != 2 or not 1024 <= ports[0] < ports[1] <= 65535:
        raise ConfigError(
            "ports must be the first and the last port of a range within 1024 to 65535",
            repr(ports),
            f"For example {PORTS}",
        )


def variables(intra_op_threads: int, inter_op_threads: int, memory_growth: bool = True) -> dict[str, str]:
    """What TensorFlow reads of these from its process' environment."""
    return {
        "TF_NUM_INTRAOP_THREADS": str(intra_op_threads),
        "TF_NUM_INTEROP_THREADS": str(inter_op_threads),
        "TF_FORCE_GPU_ALLOW_GROWTH": str(memory_growth).lower(),
    }
