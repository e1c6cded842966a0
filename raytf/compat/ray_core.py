"""Private parts of Ray: its key-value store, tokens, output of processes and the state of a cluster."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator

import ray
import ray._private.state  # states of actors
import ray._private.worker  # this process' connection
from ray._common.constants import RAY_WARN_BLOCKING_GET_INSIDE_ASYNC_ENV_VAR as WARN_BLOCKING_GET  # silences a warning
from ray._private import services  # the address that `ray.init` would use
from ray._private.authentication.authentication_token_setup import AuthenticationTokenLoader  # whether there is a token
from ray._private.authentication.authentication_utils import is_token_auth_enabled  # whether Ray sends one
from ray._private.grpc_utils import init_grpc_channel  # a channel with the token: finds out why a head does not answer
from ray._private.ray_constants import LOG_PREFIX_ACTOR_NAME  # a line that names the process in the driver's output
from ray._private.ray_logging import global_worker_stdstream_dispatcher  # handlers of processes' output
from ray._raylet import (
    RAY_NODE_GROUP_KEY,  # the label with a node's group in KubeRay or an autoscaler's config
    RAY_NODE_ID_KEY,  # the label by which an actor is placed on a node
)
from ray.core.generated import (  # a head's answers, in Ray's messages: `ray.util.state` needs the dashboard
    gcs_pb2,
    gcs_service_pb2,
    gcs_service_pb2_grpc,
)
from ray.experimental import internal_kv  # small values that outlive their writers, without a process

from raytf.compat.versions import uses_private

__all__ = [
    "LOG_PREFIX_ACTOR_NAME",
    "RAY_NODE_GROUP_KEY",
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


@uses_private("ray.experimental.internal_kv:_internal_kv_put")
def kv_put(key: str | bytes, value: str | bytes, overwrite: bool = True, namespace: bytes | None = None) -> bool:
    """Writes a value; returns whether there was one, which stays unless `overwrite`. The public way is an actor."""
    return internal_kv._internal_kv_put(key, value, overwrite, namespace=namespace)


@uses_private("ray.experimental.internal_kv:_internal_kv_get")
def kv_get(key: str, namespace: bytes | None = None) -> bytes | None:
    """Reads a value of `kv_put`, or of a namespace of Ray's."""
    return internal_kv._internal_kv_get(key, namespace=namespace)


def dashboard_address() -> str | None:
    """Returns HOST:PORT of the dashboard, where jobs are submitted, or None if it does not run."""
    return (kv_get("webui:url", namespace=b"dashboard") or b"").decode() or None


@uses_private("ray.experimental.internal_kv:_internal_kv_list")
def kv_keys(prefix: str) -> list[bytes]:
    """Returns the keys of `kv_put` that begin with a prefix."""
    return internal_kv._internal_kv_list(prefix)


@uses_private("ray._private.worker:global_worker")
def kv_remove(prefix: str, timeout: float) -> None:
    """Removes the values of `kv_put` whose keys begin with a prefix.

    Args:
        prefix: Begin of the keys.
        timeout: Seconds to wait for the cluster's head, which the function of `ray.experimental` waits for longer.

    Raises:
        RpcError: The head has not answered.
    """
    gcs_client().internal_kv_del(prefix.encode(), True, None, timeout=timeout)


@uses_private("ray.actor:ActorHandle._actor_id")
def id_of(actor) -> bytes:
    """Returns the id of an actor; `ray.util.state` needs the dashboard for it, which may not run."""
    return actor._actor_id.binary()


@uses_private("ray._private.state:actors")
def is_alive(actor_id: str) -> bool:
    """Returns whether an actor may be alive: a handle would keep it alive, and `ray.util.state` needs the dashboard."""
    try:
        return ray._private.state.actors(actor_id).get("State", "DEAD") != "DEAD"
    except Exception:  # the head does not answer now
        return True


# ------------------------------------------------------------------------------------------ the connection


@uses_private("ray._private.services:canonicalize_bootstrap_address")
def bootstrap_address(address: str | None) -> str | None:
    """Returns the "HOST:PORT" that `ray.init` would use, None if it would start Ray; no public API."""
    return services.canonicalize_bootstrap_address(address)


def token_loader():
    """Returns the loader with which Ray reads a cluster's token."""
    return AuthenticationTokenLoader.instance()


def enable_token_auth() -> None:
    """Makes this process and its children send the token, as RAY_AUTH_MODE does if set before the import."""
    os.environ[AUTH_MODE] = "token"
    from ray._raylet import Config  # was read when Ray was imported

    Config.initialize("")


@uses_private("ray._private.worker:global_worker", "ray._private.worker:WORKER_MODE")
def is_worker() -> bool:
    """Returns whether Ray started this process; `ray.get_runtime_context()` raises before `init`."""
    worker = ray._private.worker
    return worker.global_worker.mode == worker.WORKER_MODE


@uses_private("ray._private.worker:global_worker")
def gcs_client():
    """Returns this process' client of the cluster's head, for `ray.autoscaler.v2.sdk`."""
    return ray._private.worker.global_worker.gcs_client


@uses_private("ray._private.worker:_global_node", "ray._private.node:Node.is_head")
def has_started_ray() -> bool:
    """Returns whether this process started its Ray, with `ray.init` or implicitly; no public API."""
    node = ray._private.worker._global_node
    return node is not None and node.is_head()


@uses_private("ray._private.worker:_global_node", "ray._private.node:Node.get_session_dir_path")
def session_folder() -> str | None:
    """Returns Ray's folder on this node, below `ray start --temp-dir`; None without a node. No public API."""
    node = ray._private.worker._global_node
    return None if node is None else node.get_session_dir_path()


@uses_private("ray._private.worker:_global_node", "ray._private.node:Node._ray_params")
def has_given_cpus() -> bool:
    """Returns whether this process started Ray with an explicit number of CPUs; the resources contain one anyway."""
    return ray._private.worker._global_node._ray_params.num_cpus is not None


# ------------------------------------------------------------------------------------------ lines of processes


@uses_private("ray._private.worker:print_to_stdstream", "ray._private.ray_logging:WorkerStandardStreamDispatcher")
def take_lines(wrapped: Callable, raylets: Callable) -> None:
    """Intercepts the output lines of the cluster's processes: Ray prints them, or not, and has no hook.

    Args:
        wrapped: wrapped(handler) returns the handler that replaces Ray's; it must recognize its own on a second call.
        raylets: raylets(original, batch, ignore_prefix) prints the output of the cluster's raylets.
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


@uses_private("ray._private.state:available_resources_per_node")
def free_by_node() -> dict[str, dict[str, float]]:
    """Returns free resources by node; `ray.available_resources` adds up all nodes."""
    return ray._private.state.available_resources_per_node()


@uses_private("ray._private.state:GlobalState.get_max_resources_from_cluster_config")
def most_resources() -> dict | None:
    """Returns the resources to which an autoscaler may scale the cluster; None without one. No public API."""
    return ray._private.state.state.get_max_resources_from_cluster_config()


@uses_private(
    "ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator:get_or_create_autoscaling_coordinator"
)
def request_nodes(requester: str, bundles: list[dict[str, float]], selectors: list | None, seconds: float) -> None:
    """Requests nodes for bundles from the autoscaler; Ray's public function replaces the requests of all others.

    Args:
        requester: Name of the request; it replaces an earlier one of this name.
        bundles: Resources of each bundle, with those that are in use; empty to withdraw the request.
        selectors: A label selector for each bundle, or None.
        seconds: Seconds until the request expires.
    """
    from ray.data._internal.cluster_autoscaler import default_autoscaling_coordinator

    coordinator = default_autoscaling_coordinator.get_or_create_autoscaling_coordinator()
    if not bundles:
        coordinator.cancel_request.remote(requester)
        return
    coordinator.request_resources.remote(
        requester_id=requester, resources=bundles, label_selectors=selectors, expire_after_s=seconds
    )


@uses_private("ray._private.state:GlobalState.get_draining_nodes")
def draining() -> dict[str, int]:
    """Returns the deadline of each draining node by its id, in milliseconds of UNIX time; public only in Ray Train."""
    return ray._private.state.state.get_draining_nodes()


@uses_private("ray._private.state:GlobalState._connect_and_get_accessor")
def placement_groups() -> Iterator:
    """Returns placement groups with their owners and bundles, as messages; the public table has no owners."""
    accessor = ray._private.state.state._connect_and_get_accessor()
    return map(gcs_pb2.PlacementGroupTableData.FromString, accessor.get_placement_group_table())


@uses_private("ray._private.state:GlobalState._connect_and_get_accessor")
def living_actors() -> Iterator:
    """Returns living actors with their resources, as messages; `ray.util.state` needs the dashboard."""
    accessor = ray._private.state.state._connect_and_get_accessor()
    return map(gcs_pb2.ActorTableData.FromString, accessor.get_actor_table(None, "ALIVE"))
