"""Ray Train's backend for TensorFlow: addresses, ports and TF_CONFIG for each worker, at every (re)start."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import socket
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.train.backend import Backend, BackendConfig

from raytf.errors import ConfigError
from raytf.topology import tf_config

# Below the range that Linux hands out for outgoing connections and above the ports that Ray gives its workers.
_PORTS = range(20_000, 32_000)
_IMPLEMENTATIONS = ("auto", "ring", "nccl")
_WIRE_DTYPES = (None, "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class TensorflowConfig(BackendConfig):
    """How the workers' TensorFlow is set up.

    Args:
        communication: how gradients are summed between workers: "ring" and "nccl" are TensorFlow's own (its ring over
            gRPC, on any device; NCCL, on GPUs); "auto" takes raytf's ring of sockets where workers compute on one CPU
            device each, and lets TensorFlow choose elsewhere.
        gradient_dtype: "bfloat16" or "float16": floating type in which wider gradients travel over raytf's ring, half
            the bytes at the price of a rounding for each worker; None sends them as they are.
        timeout_s: seconds after which a collective that a peer does not join fails; None waits for ever.
        bytes_per_pack: gradients are sent in packs of about this many bytes; 0 takes 4 MiB in raytf's ring, and one
            pack in TensorFlow's.
        intra_op_threads: threads within one operation; None takes the CPUs that Ray gave the worker.
        inter_op_threads: operations that run at the same time; None takes as many, and at least two.
        memory_growth: take GPU memory as it is needed, not all of it at the start.
        allow_untested_keras: go on with a version of Keras that raytf is not tested with.
        seed: workers that shuffle unseeded tf.data pipelines shuffle them alike; None draws one seed for the run.

    Raises:
        ConfigError: a value outside its range.
    """

    communication: str = "auto"
    gradient_dtype: str | None = None
    timeout_s: float | None = None
    bytes_per_pack: int = 0
    intra_op_threads: int | None = None
    inter_op_threads: int | None = None
    memory_growth: bool = True
    allow_untested_keras: bool = False
    seed: int | None = None
    # The trainer's datasets by name, for `raytf.get_dataset`; set by the trainers.
    feed: Any = field(default=None, repr=False)
    strategy: str = field(default="auto", repr=False)

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
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise ConfigError("timeout_s must be more than 0 seconds, or None", self.timeout_s, "Raise it")
        if self.bytes_per_pack < 0:
            raise ConfigError("bytes_per_pack must be at least 0", self.bytes_per_pack, "Use 0 for one pack")
        for name in ("intra_op_threads", "inter_op_threads"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, or None", getattr(self, name), "Raise it")

    @property
    def backend_cls(self):
        return TensorflowBackend

    @property
    def train_func_context(self):
        return functools.partial(_worker_context, self)

    def to_dict(self) -> dict[str, Any]:
        hidden = ("feed",)
        return {k: v for k, v in vars(self).items() if k not in hidden}


class TensorflowBackend(Backend):
    """Gives every worker an address of its own and tells it those of all."""

    def on_start(self, worker_group, backend_config: TensorflowConfig):
        addresses = worker_group.execute(reserve_address)
        resources = worker_group.get_resources_per_worker()
        cpus = max(1, int(resources.get("CPU", 1)))
        ray.get(
            [
                worker_group.execute_single_async(i, set_environment, backend_config, addresses, i, cpus)
                for i in range(len(addresses))
            ]
        )


@contextlib.contextmanager
def _worker_context(config: TensorflowConfig):
    from raytf.keras_import import import_keras

    import_keras()
    from raytf import strategy  # imports TensorFlow, so on a worker only

    with strategy.prepared(config):
        yield


# ------------------------------------------------------------------------------------------ on the worker

_reserved: list[socket.socket] = []


def reserve_address() -> str:
    """This worker's "host:port", on a port that no other raytf process of the host takes while this one lives."""
    release_port()
    host = ray.util.get_node_ip_address()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in random.sample(_PORTS, len(_PORTS)):
        claim = _claim(port)
        if claim is None:
            continue
        held = socket.socket(family, socket.SOCK_STREAM)
        try:
            held.bind(("::" if family == socket.AF_INET6 else "", port))
        except OSError:  # another program listens there
            held.close()
            claim.close()
            continue
        _reserved[:] = [held]
        _claims.append(claim)
        return f"[{host}]:{port}" if family == socket.AF_INET6 else f"{host}:{port}"
    raise ConfigError("A worker needs a free port", f"none of {_PORTS[0]} to {_PORTS[-1]} is free", "Free one")


_claims: list[socket.socket] = []


def _claim(port: int) -> socket.socket | None:
    """Keeps other raytf processes from a port between its release here and TensorFlow's bind.

    The claim is a Unix socket in Linux' abstract namespace: it is no file, and ends with the process.
    """
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    if not hasattr(os, "sched_getaffinity"):  # not Linux: the bound socket alone must do
        return claim
    try:
        claim.bind(f"\0raytf/{port}")
    except OSError:
        claim.close()
        return None
    return claim


def release_port() -> None:
    """Frees the reserved port, just before TensorFlow binds it (it cannot while it is held)."""
    while _reserved:
        _reserved.pop().close()


def set_environment(config: TensorflowConfig, addresses: list[str], rank: int, cpus: int) -> None:
    """Writes what TensorFlow reads from the environment; runs before TensorFlow is imported."""
    os.environ["TF_CONFIG"] = tf_config({"worker": addresses}, "worker", rank)
    os.environ["TF_NUM_INTRAOP_THREADS"] = str(config.intra_op_threads or cpus)
    os.environ["TF_NUM_INTEROP_THREADS"] = str(config.inter_op_threads or max(2, cpus))
    os.environ["TF_FORCE_GPU_ALLOW_GROWTH"] = str(config.memory_growth).lower()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
