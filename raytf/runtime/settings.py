"""Configuration of the workers' TensorFlow: values and their ranges."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from raytf import timeouts, validation
from raytf.errors import ConfigError
from raytf.runtime import networks
from raytf.timeouts import Timeouts
from raytf.validation import is_number

_IMPLEMENTATIONS = ("auto", "ring", "nccl")
_WIRE_DTYPES = (None, "bfloat16", "float16")
# First and last: below the range that Linux uses for outgoing connections, above the ports of Ray's own workers.
PORTS = (20_000, 31_999)
# Coordinator and servers wait for each other in several operations at once: on two cores, TensorFlow's default of two
# threads hung, and six ran.
SERVER_THREADS = 8
# Seconds until all workers have made a step, in which graphs are compiled.
FIRST_STEP_TIMEOUT = 300.0


class Listening(NamedTuple):
    """Where processes of a run listen: `ports` and `network` of `TensorflowConfig`."""

    ports: tuple[int, int] = PORTS
    network: str | None = None


@dataclass(frozen=True, kw_only=True)
class TensorflowConfig:
    """Configures TensorFlow, communication and recovery of the workers.

    Args:
        communication: How gradients are all-reduced. "auto", the default: by raytf's ring of sockets if each worker
            computes on one CPU device, else as TensorFlow chooses. "ring": by TensorFlow's ring over gRPC, on any
            device. "nccl": by NCCL, on GPUs.
        gradient_dtype: "bfloat16" or "float16": floating type of gradients on raytf's ring. It halves the traffic, and
            rounds once per worker; "float16" has one scale per 2046 numbers. None sends gradients as they are.
        sync_every: Number of steps between averages of the parameters, at least 1. 1, the default, all-reduces the
            gradients of each step. With more each worker makes steps on its own rows in between. This reduces the
            traffic on slow networks, and results differ from those of one process.
        sparse_updates: "lazy": an optimizer updates only the rows of an `Embedding` that a batch uses, and the moments
            of these. A step's time depends on these rows, and not on the table. For Keras' SGD, Adam, AdamW, Adagrad
            and Ftrl; the results differ from Keras' own, see `docs/guides/strategies.md`. None: as Keras does.
        shard_optimizer: Whether each worker of a `KerasTrainer` keeps and updates its share of the optimizer's state,
            with the same results. This is ZeRO stage 1 (Rajbhandari et al., 2020, arXiv:1910.02054). For workers on
            raytf's ring, and Keras' SGD, Adam, AdamW, Adamax, Adagrad, Adadelta, RMSprop, Lion and Ftrl. A lost worker
            is not replaced in place: all workers restart from the last checkpoint. See `docs/guides/strategies.md`.
        timeout_s: Timeout in seconds of a collective, of raytf's ring or TensorFlow, in which a worker sends nothing.
            None waits forever.
        hang_timeout_s: Seconds after which a line names the worker that the others wait for; at least 2, 10 by default.
            The line also has its phase and its Python stack. The timeout is 30 times the usual step if that is more.
            After three times as long its process is ended, and it counts as lost. In a callback, in the input or in a
            checkpoint that is 30 times as long. The same holds while the worker still makes progress. A process that is
            stopped (SIGSTOP) is ended, one that computes is not. None turns hang detection off; a stopped process is
            then ended after 10 s.
        heal: Whether a lost worker is replaced in place, where FailureConfig allows failures. True by default. It
            applies to workers of a `KerasTrainer` or of trials of its sweep that use raytf's ring. `raytf.fit` replaces
            workers without this option, at most three times in a call. The other workers keep their processes and wait
            in their step. After each step every worker sends its own state (metrics, moving statistics, seeds) to
            another one. If False, or if it is not possible, all workers restart from the last checkpoint.
        spares: Number of standby workers on each host that has workers, at least 0, which is the default. A standby
            worker replaces a lost worker faster: it has imported TensorFlow and has made a warm-up step. It makes this
            step with the model on the first rows, and discards the result. For that it calls `build_model`, and traces
            `map` and `train_step`, outside of Ray Train's context; no callback is called. If that fails, a warning is
            logged, and it has only imported TensorFlow. It takes 0.7 GB of memory plus the model, and no CPU of the
            cluster. Needs `heal=True`, failures that FailureConfig allows, communication="auto", sync_every=1, and at
            least two workers, more than `spares`, on CPUs.
        first_step_timeout_s: As `hang_timeout_s`, until all workers have made their first step; at least
            `hang_timeout_s`, 300 by default. Workers compile in this step.
        bytes_per_pack: Size in bytes of the packs in which gradients are sent, at least 0. 0, the default, means 4 MiB
            on raytf's ring, and one pack for TensorFlow's collectives.
        intra_op_threads: Number of threads in one operation, at least 1. None takes the worker's CPUs in Ray.
        inter_op_threads: Number of operations that run in parallel, at least 1. None takes the worker's CPUs, at least
            2.
        pin_cpus: Whether each worker runs on cores of its own. False leaves the placement to Linux. "auto" gives each
            worker as many cores as it has CPUs in Ray. It does so if the host has enough for all workers of the run
            there. No other worker of any run uses them. Cores that no worker has can be used by all. Processes that
            write checkpoints are not pinned. It helps where workers fill a host, and hurts where other programs keep a
            core busy. It has no effect outside of Linux, for workers of less than one CPU, and with parameter servers.
        memory_growth: Whether GPU memory is allocated as needed, instead of all at the start; True by default.
        renew_worker_mb: Limit in megabytes (10^6 bytes) for the growth of a worker, at least 1; 4000 by default. It
            applies to workers that are kept between trials of a sweep or calls of `raytf.fit`. If a worker has grown by
            more since its first trial or call, new workers run the next one. A line is then logged. None: no limit.
            TensorFlow and Keras can leak traced graphs (Keras issues 20552 and 21090).
        ports: Tuple of the first and the last port that workers listen on, for raytf's ring and TensorFlow. It must
            have at least one port per worker of a host. The default is (20000, 31999). Reserve them for raytf; see
            `docs/guides/cluster.md`. None: any free port.
        network: Name of the network interface on which workers listen and exchange, such as "eth1". Or the network of
            its addresses, such as "10.1.0.0/16", if hosts name it differently. NCCL uses it, too, unless
            NCCL_SOCKET_IFNAME is set. None: the interface with the address of the host in Ray, which is the one that
            reaches Ray's head.
        legacy_keras: Whether `tf.keras` of the workers is Keras 2 (the package tf_keras), as under Ray's own trainer;
            for a `TensorflowTrainer`. raytf's support for Keras 3 is then off. TF_USE_LEGACY_KERAS=1 in the driver's
            environment, or in a runtime environment of Ray, has the same effect.
        seed: TensorFlow's global seed in workers of a `TensorflowTrainer`, so that `tf.data` shuffles alike on all.
            None draws one for each run, and is 0 in a sweep. A `KerasTrainer` uses its own `seed` instead.

    Raises:
        ConfigError: A value is outside of its range.

    Example:
        >>> import raytf
        >>> config = raytf.TensorflowConfig(spares=1, hang_timeout_s=30)
    """

    communication: str = "auto"
    gradient_dtype: str | None = None
    sync_every: int = 1
    sparse_updates: Literal["lazy"] | None = None
    shard_optimizer: bool = False
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
    network: str | None = None
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
            raise ConfigError(
                "sync_every must be a number of steps, at least 1", repr(self.sync_every), "Pass 1 or more"
            )
        if self.sync_every > 1 and self.gradient_dtype is not None:
            raise ConfigError(
                "gradient_dtype is for gradients that travel, and with sync_every parameters do",
                f"gradient_dtype={self.gradient_dtype!r} with sync_every={self.sync_every}",
                "Leave one of them out",
            )
        if self.sparse_updates not in (None, "lazy"):
            raise ConfigError('sparse_updates must be "lazy" or None', repr(self.sparse_updates), "Choose one of them")
        for name in ("shard_optimizer", "heal", "memory_growth", "legacy_keras"):
            validation.check_flag(name, getattr(self, name))
        others = {"gradient_dtype": None, "sync_every": 1, "sparse_updates": None, "legacy_keras": False, "spares": 0}
        others |= {"communication": "auto"}
        others = [f"{name}={getattr(self, name)!r}" for name, value in others.items() if getattr(self, name) != value]
        if self.shard_optimizer and others:
            raise ConfigError(
                "shard_optimizer needs the whole gradients of each step on raytf's ring, and a lost worker's share is "
                "nowhere else",
                f"shard_optimizer=True with {', '.join(others)}",
                "Leave one of them out",
            )
        if self.legacy_keras and (self.gradient_dtype or self.sync_every > 1 or self.sparse_updates):
            raise ConfigError(
                "gradient_dtype, sync_every and sparse_updates are for Keras 3",
                f"gradient_dtype={self.gradient_dtype!r}, sync_every={self.sync_every}, "
                f"sparse_updates={self.sparse_updates!r} with legacy_keras=True",
                "Leave them out, or use Keras 3",
            )
        if self.timeout_s is not None and not (is_number(self.timeout_s) and self.timeout_s > 0):
            rule = "timeout_s must be more than 0 seconds, or None"
            raise ConfigError(rule, repr(self.timeout_s), "Pass more than 0, or None")
        if self.hang_timeout_s is not None and not (is_number(self.hang_timeout_s) and self.hang_timeout_s >= 2):
            rule = "hang_timeout_s must be at least 2 seconds, or None"
            raise ConfigError(rule, repr(self.hang_timeout_s), "Pass 2 or more, or None")
        first = self.first_step_timeout_s
        if not (is_number(first) and first >= (self.hang_timeout_s or 2)):
            raise ConfigError(
                "first_step_timeout_s must be at least hang_timeout_s, as graphs are compiled in the first step",
                repr(first),
                f"Pass {self.hang_timeout_s or 2:g} or more",
            )
        if isinstance(self.spares, bool) or not isinstance(self.spares, int) or self.spares < 0:
            raise ConfigError("spares must be a number of processes, at least 0", repr(self.spares), "Pass 0 or more")
        if self.spares and (not self.heal or self.communication != "auto" or self.sync_every > 1):
            raise ConfigError(
                "spares replace lost workers in place, which needs heal=True",
                f"spares={self.spares} with heal={self.heal}, communication={self.communication!r}, "
                f"sync_every={self.sync_every}",
                'Leave spares out, or use heal=True, communication="auto" and sync_every=1',
            )
        if self.pin_cpus != "auto" and self.pin_cpus is not False:
            raise ConfigError('pin_cpus must be "auto" or False', repr(self.pin_cpus), "Choose one of them")
        if not (is_number(self.bytes_per_pack) and self.bytes_per_pack >= 0):
            raise ConfigError("bytes_per_pack must be at least 0", repr(self.bytes_per_pack), "Use 0 for the default")
        if self.renew_worker_mb is not None and not (is_number(self.renew_worker_mb) and self.renew_worker_mb >= 1):
            rule = "renew_worker_mb must be at least 1 megabyte, or None"
            raise ConfigError(rule, repr(self.renew_worker_mb), "Pass 1 or more, or None")
        check_ports(self.ports)
        networks.check_network(self.network)
        for name in ("intra_op_threads", "inter_op_threads"):
            if getattr(self, name) is not None:
                validation.check_whole(name, getattr(self, name), 1)
        if self.seed is not None:
            validation.check_seed(self.seed)

    @property
    def listening(self) -> Listening:
        """Returns where workers listen."""
        return Listening(self.ports, self.network)


@dataclass(frozen=True, kw_only=True)
class WorkerSetup:
    """Settings that a driver sends to the processes of its workers, for any kind of training.

    Args:
        config: The user's config.
        strategy: Strategy that `raytf.get_strategy()` builds.
        tpu: Whether the workers hold TPUs.
        datasets: Datasets of a TensorflowTrainer by name, for `raytf.get_dataset`.
        servers: The `servers.ServerSpec` of a ParameterServerStrategy.
        warned: A `progress.Entries`, in which the worker that shows a warning claims it.
        board: A `progress.Board`, to which the chief sends the progress of a `fit` in a train loop.
        log_level: Level from which log lines of the package `ray.train` are shown.
        timeouts: Timeouts of the driver.
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
    """Returns the environment variables of TensorFlow for these settings."""
    return {
        "TF_NUM_INTRAOP_THREADS": str(intra_op_threads),
        "TF_NUM_INTEROP_THREADS": str(inter_op_threads),
        "TF_FORCE_GPU_ALLOW_GROWTH": str(memory_growth).lower(),
    }
