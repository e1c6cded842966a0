"""What Ray itself does not make public: its key-value store, tokens, lines of processes and the state of a cluster."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator

import ray
import ray._private.state  # which actors live
import ray._private.worker  # this process' connection
from ray._common.constants import RAY_WARN_BLOCKING_GET_INSIDE_ASYNC_ENV_VAR as WARN_BLOCKING_GET  # keeps it quiet
from ray._private import services  # which address `ray.init` would go to
from ray._private.authentication.authentication_token_setup import AuthenticationTokenLoader  # whether there is a token
from ray._private.authentication.authentication_utils import is_token_auth_enabled  # whether Ray sends one
from ray._private.grpc_utils import init_grpc_channel  # a channel with the token: to ask a head why it does not answer
from ray._private.ray_constants import LOG_PREFIX_ACTOR_NAME  # a line that names the process in what the driver gets
from ray._private.ray_logging import global_worker_stdstream_dispatcher  # who gets the lines of processes
from ray._raylet import RAY_NODE_ID_KEY  # the label by which an actor is placed on a node
from ray.core.generated import (  # what a head answers, in Ray's messages: `ray.util.state` needs the dashboard
    gcs_pb2,
    gcs_service_pb2,
    gcs_service_pb2_grpc,
)
from ray.experimental import internal_kv  # small values that outlive their writers, without a process

from raytf.compat.versions import uses

__all__ = [
    "LOG_PREFIX_ACTOR_NAME",
    "RAY_NODE_ID_KEY",
    "WARN_BLOCKING_GET",
    "gcs_pb2",
    "gcs_service_pb2",
    "gcs_service_pb2_grpc",
    "init_grpc_channel",
    "is_token_auth_enabled",
]
AUTH_MODE = "RAY_AUTH_MODE"


# ------------------------------------------------------------------------------------------ key-value store


@uses("ray.experimental.internal_kv:_internal_kv_put")
def put(key: str | bytes, value: str | bytes, overwrite: bool = True, namespace: bytes | None = None) -> bool:
    """Writes a value; whether there was one, which stays unless `overwrite`. The public way, an actor, is a process."""
    return internal_kv._internal_kv_put(key, value, overwrite, namespace=namespace)


@uses("ray.experimental.internal_kv:_internal_kv_get")
def get(key: str) -> bytes | None:
    """Reads a value of `put`."""
    return internal_kv._internal_kv_get(key)


@uses("ray.experimental.internal_kv:_internal_kv_list")
def keys(prefix: str) -> list[bytes]:
    """The keys of `put` that begin with a prefix."""
    return internal_kv._internal_kv_list(prefix)


@uses("ray.experimental.internal_kv:_internal_kv_del")
def remove_all(prefix: str) -> None:
    """Removes the values of `put` whose keys begin with a prefix."""
    internal_kv._internal_kv_del(prefix, del_by_prefix=True)


@uses("ray.actor:ActorHandle._actor_id")
def id_of(actor) -> bytes:
    """The id of an actor; `ray.util.state` finds it by a call to the dashboard, which need not run."""
    return actor._actor_id.binary()


@uses("ray._private.state:actors")
def lives(actor_id: str) -> bool:
    """Whether an actor lives, or may: a handle would keep it alive, and `ray.util.state` asks the dashboard."""
    try:
        return ray._private.state.actors(actor_id).get("State", "DEAD") != "DEAD"
    except Exception:  # the head does not answer now
        return True


# ------------------------------------------------------------------------------------------ the connection


@uses("ray._private.services:canonicalize_bootstrap_address")
def bootstrap_address(address: str | None) -> str | None:
    """The "HOST:PORT" that `ray.init` would go to, None where it would start a Ray; nothing public tells."""
    return services.canonicalize_bootstrap_address(address)


def token_loader():
    """Where Ray looks for a cluster's token."""
    return AuthenticationTokenLoader.instance()


def enable_token_auth() -> None:
    """Has this process and its children send the token, as RAY_AUTH_MODE does that is set before the import."""
    os.environ[AUTH_MODE] = "token"
    from ray._raylet import Config  # read when Ray was imported

    Config.initialize("")


@uses("ray._private.worker:global_worker", "ray._private.worker:WORKER_MODE")
def is_worker() -> bool:
    """Whether this process is one that Ray started; `ray.get_runtime_context()` refuses to tell before `init`."""
    worker = ray._private.worker
    return worker.global_worker.mode == worker.WORKER_MODE


@uses("ray._private.worker:global_worker")
def gcs_client():
    """This process' line to the cluster's head; `ray.autoscaler.v2.sdk` wants it."""
    return ray._private.worker.global_worker.gcs_client


@uses("ray._private.worker:_global_node", "ray._private.node:Node.is_head")
def started_here() -> bool:
    """Whether this process started its Ray, with `ray.init` or by itself; nothing public tells."""
    node = ray._private.worker._global_node
    return node is not None and node.is_head()


@uses("ray._private.worker:_global_node", "ray._private.node:Node.get_session_dir_path")
def session_folder() -> str | None:
    """Ray's folder on this node, below `ray start --temp-dir`; None where this process has no node. Nothing public."""
    node = ray._private.worker._global_node
    return None if node is None else node.get_session_dir_path()


@uses("ray._private.worker:_global_node", "ray._private.node:Node._ray_params")
def cpus_were_said() -> bool:
    """Whether who started Ray in this process said how many CPUs it has; the resources hold a number either way."""
    return ray._private.worker._global_node._ray_params.num_cpus is not None


# ------------------------------------------------------------------------------------------ lines of processes


@uses("ray._private.worker:print_to_stdstream", "ray._private.ray_logging:WorkerStandardStreamDispatcher")
def take_lines(wrapped: Callable, raylets: Callable) -> None:
    """Takes the lines of the cluster's processes as they come: Ray prints them, or not, and has no hook.

    Args:
        wrapped: wrapped(handler) -> the handler in the place of Ray's; called again it must know its own.
        raylets: raylets(original, batch, ignore_prefix): prints what the cluster's raylets say.
    """
    dispatcher, worker = global_worker_stdstream_dispatcher, ray._private.worker
    if not hasattr(worker.print_to_stdstream, "raytf_original"):
        original = worker.print_to_stdstream

        @functools.wraps(original)
        def print_to_stdstream(batch, ignore_prefix):
            raylets(original, batch, ignore_prefix)

        print_to_stdstream.raytf_original = original
        worker.print_to_stdstream = print_to_stdstream
    with dispatcher._lock:
        dispatcher.handlers = [
            (name, wrapped(handler) if name == "ray_print_logs" else handler) for name, handler in dispatcher.handlers
        ]


# ------------------------------------------------------------------------------------------ the cluster


@uses("ray._private.state:available_resources_per_node")
def free_by_node() -> dict[str, dict[str, float]]:
    """Free resources by node; `ray.available_resources` adds all nodes up."""
    return ray._private.state.available_resources_per_node()


@uses("ray._private.state:GlobalState.get_max_resources_from_cluster_config")
def most_resources() -> dict | None:
    """What an autoscaler may bring the cluster to; None without one. Nothing public tells."""
    return ray._private.state.state.get_max_resources_from_cluster_config()


@uses("ray._private.state:GlobalState.get_draining_nodes")
def draining() -> dict[str, int]:
    """When each drained node goes, by its id, in milliseconds of UNIX time; the public way needs Ray Train."""
    return ray._private.state.state.get_draining_nodes()


@uses("ray._private.state:GlobalState._connect_and_get_accessor")
def placement_groups() -> Iterator:
    """Placement groups with their owners and bundles, as messages; the public table has no owners."""
    accessor = ray._private.state.state._connect_and_get_accessor()
    return map(gcs_pb2.PlacementGroupTableData.FromString, accessor.get_placement_group_table())


@uses("ray._private.state:GlobalState._connect_and_get_accessor")
def living_actors() -> Iterator:
    """Actors that live with what they hold, as messages; `ray.util.state` needs the dashboard."""
    accessor = ray._private.state.state._connect_and_get_accessor()
    return map(gcs_pb2.ActorTableData.FromString, accessor.get_actor_table(None, "ALIVE"))
