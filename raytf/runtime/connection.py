"""The Ray cluster of a run: an existing one, or a new one on this machine that is large enough. Driver side."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

import grpc
import ray
from ray.exceptions import AuthenticationError

from raytf import logs, timeouts
from raytf.compat import ray_core
from raytf.compat.ray_core import gcs_service_pb2, gcs_service_pb2_grpc, init_grpc_channel, is_token_auth_enabled
from raytf.console import quiet
from raytf.errors import ConfigError, ResourceError, first_line

logger = logs.get_logger(__name__)

_THIS_MACHINE = "this machine"
_NO_TOKEN = (
    "Put the cluster's token (`ray get-auth-token` on a host of it) into ~/.ray/auth_token, or into a file that "
    "RAY_AUTH_TOKEN_PATH names"
)
_OTHER_TOKEN = "Set RAY_AUTH_TOKEN to the cluster's token, or unset it: Ray reads no file while it is set"

# Functions that release resources which this process holds without need; called before another run requests some.
idle: list[Callable[[], None]] = []


def session() -> str | None:
    """Returns an id of this driver in its cluster, or None without one; other functions of Ray would start Ray."""
    if not ray.is_initialized():
        return None
    context = ray.get_runtime_context()
    return f"{context.gcs_address} {context.get_worker_id()}"


def connect(
    bundles: Sequence[Mapping[str, float]], address: str | None = None, *, keep_idle: bool = False, **options
) -> None:
    """Connects this process to Ray, unless it is connected.

    Starts Ray on this machine if no cluster is named or found, with the CPUs that the run requests. Processes may share
    cores. An existing cluster keeps its own count. If a cluster requires a token, it gets the one of RAY_AUTH_TOKEN, of
    the file RAY_AUTH_TOKEN_PATH, or of ~/.ray/auth_token. Ray itself sends none to a given address unless
    RAY_AUTH_MODE=token is set.

    Args:
        bundles: Resources of each process of the run.
        address: Address of the cluster; None uses RAY_ADDRESS, the job's, or the newest of this machine.
        keep_idle: Whether to keep the resources in `idle`, too.
        options: Options for `ray.init`.

    Raises:
        ConfigError: There is no cluster at the address, or it rejects this process.
        ResourceError: Ray does not start.
    """
    for give_up in [] if keep_idle else idle:
        give_up()
    if ray.is_initialized():
        return
    name, cluster = _parse_address(address), resolve_address(address)
    if cluster is not None and name == _THIS_MACHINE and _has_ended(cluster):
        logger.warning(f"the last Ray of this machine, {cluster}, has ended; another one is started")
        address, cluster = "local", None
    try:
        if cluster is None:
            wanted, cores = math.ceil(sum(bundle.get("CPU", 0) for bundle in bundles)), os.cpu_count() or 1
            if wanted > cores:
                logger.info(f"{len(bundles)} processes share the {cores} core(s) of this machine")
            options["num_cpus"] = max(wanted, cores)
        else:
            _check_cluster(cluster, name if name != _THIS_MACHINE else f"{cluster}, the last Ray of this machine")
        with _sigterm_kept(), quiet.quiet_ray_start():
            ray.init(address=address, **options)
    except ConfigError:
        raise
    except (AuthenticationError, ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            "raytf needs a Ray cluster that answers and lets this process in",
            f"{name}: {first_line(error)}",
            "Check the address, and the token where the cluster wants one",
        ) from error
    except Exception as error:  # of no class of its own
        raise ResourceError(
            "Ray must start, or let this process in, in time",
            first_line(error),
            "Try again when this machine is less busy, or look at /tmp/ray/session_latest/logs",
        ) from error


@contextlib.contextmanager
def _sigterm_kept() -> Iterator[None]:
    """Restores the handler of SIGTERM at the end: Ray replaces it meanwhile, and would exit with code 15."""
    previous = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except SystemExit as error:
        if error.code == signal.SIGTERM:
            _exit(signal.SIGTERM)
        raise
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, previous if callable(previous) else _exit)


def _exit(number: int, frame=None) -> None:
    sys.exit(128 + number)


def resolve_address(address: str | None = None) -> str | None:
    """Returns the "HOST:PORT" of the cluster that `connect` would use, or None if it would start Ray.

    Raises:
        ConfigError: The address is invalid.
    """
    try:
        return ray_core.bootstrap_address(address)
    except (OSError, ValueError) as error:
        raise ConfigError(
            "The address of a Ray cluster is HOST:PORT, local or auto",
            f"{_parse_address(address)!r} ({error})",
            "Pass one of these, such as 10.0.0.1:6379",
        ) from error


def _parse_address(address: str | None) -> str:
    return address or os.environ.get("RAY_ADDRESS") or _THIS_MACHINE


def _has_ended(address: str) -> bool:
    """Returns whether a "host:port" refuses connections; a slow host has not ended."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeouts.get().head_answer):
            return False
    except ConnectionRefusedError:
        return True
    except OSError:
        return False


def _check_cluster(address: str, location: str) -> None:
    """Checks that a cluster answers, and enables Ray's token in this process if the cluster requires one.

    Args:
        address: "host:port" of the cluster's head.
        location: The same, as the user wrote it.

    Raises:
        ConfigError: It does not answer, or requires a token that is missing or another one.
    """
    if is_token_auth_enabled() and not _has_token():
        raise ConfigError("With RAY_AUTH_MODE=token Ray needs a token", "none where Ray looks for it", _NO_TOKEN)
    if _accepts(address, location):
        return
    if is_token_auth_enabled():
        raise _refused_error(location)
    mode = os.environ.get(ray_core.AUTH_MODE)
    if mode is not None:
        fix = "Set RAY_AUTH_MODE=token, or leave it out"
        raise ConfigError(f"The cluster at {location} wants a token", f"RAY_AUTH_MODE={mode}", fix)
    if not _has_token():
        raise ConfigError(f"The cluster at {location} wants a token", "none where Ray looks for it", _NO_TOKEN)
    ray_core.enable_token_auth()
    if not _accepts(address, location):
        raise _refused_error(location)


def _accepts(address: str, location: str) -> bool:
    """Returns whether a cluster's head answers this process; False if it requires a token, or another one.

    Raises:
        ConfigError: It does not answer.
    """
    with init_grpc_channel(address) as channel:
        ask = gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel).CheckAlive
        try:
            ask(gcs_service_pb2.CheckAliveRequest(), timeout=timeouts.get().head_answer)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.UNAUTHENTICATED:
                return False
            raise ConfigError(
                "raytf needs a Ray cluster that answers",
                f"{location}: {first_line(error.details()) or error.code().name}",
                "Check the address, HOST:PORT of `ray start --head` (port 6379 unless another was chosen), and that "
                "the head runs; RAY_ADDRESS=local starts a Ray of one's own",
            ) from None  # gRPC's text is in the message, and its traceback does not help a user
    return True


def _has_token() -> bool:
    try:
        return ray_core.token_loader().has_token(ignore_auth_mode=True)
    except AuthenticationError as error:
        received = first_line(error).partition(". ")[0]
        raise ConfigError("Ray's token must be one that can be read", received, _NO_TOKEN) from error


def _refused_error(location: str) -> ConfigError:
    from_variable, path = os.environ.get("RAY_AUTH_TOKEN"), os.environ.get("RAY_AUTH_TOKEN_PATH")
    source = "RAY_AUTH_TOKEN" if from_variable else path or os.path.join("~", ".ray", "auth_token")
    fix = _OTHER_TOKEN if from_variable else _NO_TOKEN
    return ConfigError(f"The cluster at {location} requires its token", f"another one, of {source}", fix)
