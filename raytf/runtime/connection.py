"""The Ray cluster of a run: the one that is there, or one of this machine that is large enough. Driver side."""

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
from raytf.errors import ConfigError, first_line

logger = logs.get_logger(__name__)

_HERE = "this machine"
_NO_TOKEN = (
    "Put the cluster's token (`ray get-auth-token` on a host of it) into ~/.ray/auth_token, or into a file that "
    "RAY_AUTH_TOKEN_PATH names"
)

# What this process keeps of the cluster without need; each is called before another run looks for room.
idle: list[Callable[[], None]] = []


def connect(
    bundles: Sequence[Mapping[str, float]], address: str | None = None, *, keep_idle: bool = False, **options
) -> None:
    """Connects this process to Ray, unless it is connected.

    Where no cluster is named or found, Ray is started on this machine, with the CPUs that the run asks for: processes
    may share cores. A cluster that is there keeps its own count. One that wants a token gets the one that Ray keeps in
    RAY_AUTH_TOKEN, in the file of RAY_AUTH_TOKEN_PATH or in ~/.ray/auth_token: Ray itself sends none to an address that
    is given unless RAY_AUTH_MODE=token is set.

    Args:
        bundles: resources of each of the run's processes.
        address: of the cluster; None takes RAY_ADDRESS, the job's, or the newest of this machine.
        keep_idle: keep what is in `idle`, too.
        options: for `ray.init`.

    Raises:
        ConfigError: there is no cluster at the address, or it does not let this process in.
    """
    for give_up in [] if keep_idle else idle:
        give_up()
    if ray.is_initialized():
        return
    where, found = _named(address), located(address)
    if found is not None and where == _HERE and _has_ended(found):
        logger.warning(f"the last Ray of this machine, {found}, has ended; another one is started")
        address, found = "local", None
    try:
        if found is None:
            wanted, cores = math.ceil(sum(bundle.get("CPU", 0) for bundle in bundles)), os.cpu_count() or 1
            if wanted > cores:
                logger.info(f"{len(bundles)} processes share the {cores} core(s) of this machine")
            options["num_cpus"] = max(wanted, cores)
        else:
            _knock(found, where if where != _HERE else f"{found}, the last Ray of this machine")
        with _sigterm_kept(), quiet.ray_starts():
            ray.init(address=address, **options)
    except ConfigError:
        raise
    except (AuthenticationError, ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            "raytf needs a Ray cluster that answers and lets this process in",
            f"{where}: {first_line(error)}",
            "Check the address, and the token where the cluster wants one",
        ) from error


@contextlib.contextmanager
def _sigterm_kept() -> Iterator[None]:
    """Within it Ray takes SIGTERM for itself, and would end this process with 15; behind it is whose it was before."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except SystemExit as error:
        if error.code == signal.SIGTERM:
            _exit(signal.SIGTERM)
        raise
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before if callable(before) else _exit)


def _exit(number: int, frame=None) -> None:
    sys.exit(128 + number)


def located(address: str | None = None) -> str | None:
    """The "HOST:PORT" of the cluster that `connect` would go to, or None where it would start a Ray.

    Raises:
        ConfigError: the address is none.
    """
    try:
        return ray_core.bootstrap_address(address)
    except (OSError, ValueError) as error:
        raise ConfigError(
            "The address of a Ray cluster is HOST:PORT, local or auto", f"{_named(address)!r} ({error})", "Correct it"
        ) from error


def _named(address: str | None) -> str:
    return address or os.environ.get("RAY_ADDRESS") or _HERE


def _has_ended(address: str) -> bool:
    """Returns whether nobody listens at a "host:port" any more; one that is slow has not ended."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeouts.get().head_answer):
            return False
    except ConnectionRefusedError:
        return True
    except OSError:
        return False


def _knock(address: str, where: str) -> None:
    """Sees that a cluster answers, and turns Ray's token on in this process where that is wanted.

    Args:
        address: "host:port" of its head.
        where: the same, as the user gave it.

    Raises:
        ConfigError: it does not answer, or wants a token that is not there, or another one.
    """
    if is_token_auth_enabled() and not _has_token():
        raise ConfigError("With RAY_AUTH_MODE=token Ray needs a token", "none where Ray looks for it", _NO_TOKEN)
    if _lets_in(address, where):
        return
    if is_token_auth_enabled():
        raise _refused(where)
    mode = os.environ.get(ray_core.AUTH_MODE)
    if mode is not None:
        fix = "Set RAY_AUTH_MODE=token, or leave it out"
        raise ConfigError(f"The cluster at {where} wants a token", f"RAY_AUTH_MODE={mode}", fix)
    if not _has_token():
        raise ConfigError(f"The cluster at {where} wants a token", "none where Ray looks for it", _NO_TOKEN)
    ray_core.enable_token_auth()
    if not _lets_in(address, where):
        raise _refused(where)


def _lets_in(address: str, where: str) -> bool:
    """Whether a cluster's head answers this process; False where it wants a token, or another one.

    Raises:
        ConfigError: it does not answer.
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
                f"{where}: {first_line(error.details()) or error.code().name}",
                "Check the address, HOST:PORT of `ray start --head` (port 6379 unless another was chosen), and that "
                "the head runs; RAY_ADDRESS=local starts a Ray of one's own",
            ) from None  # it says what gRPC says, whose traceback tells a user nothing
    return True


def _has_token() -> bool:
    try:
        return ray_core.token_loader().has_token(ignore_auth_mode=True)
    except AuthenticationError as error:
        received = first_line(error).partition(". ")[0]
        raise ConfigError("Ray's token must be one that can be read", received, _NO_TOKEN) from error


def _refused(where: str) -> ConfigError:
    from_variable, path = os.environ.get("RAY_AUTH_TOKEN"), os.environ.get("RAY_AUTH_TOKEN_PATH")
    source = "RAY_AUTH_TOKEN" if from_variable else path or os.path.join("~", ".ray", "auth_token")
    return ConfigError(f"The cluster at {where} lets in who has its token", f"another one, of {source}", _NO_TOKEN)
