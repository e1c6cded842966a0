"""The Ray cluster of a run: the one that is there, or one of this machine that is large enough. Driver side."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence

import ray
from ray._private import services

from raytf.errors import ConfigError, first_line

# What this process keeps of the cluster without need; each is called before another run looks for room.
idle: list[Callable[[], None]] = []


def connect(
    bundles: Sequence[Mapping[str, float]], address: str | None = None, *, keep_idle: bool = False, **options
) -> None:
    """Connects this process to Ray, unless it is connected.

    Where no cluster is named or found, Ray is started on this machine, with the CPUs that the run asks for: processes
    may share cores. A cluster that is there keeps its own count.

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
    try:
        if services.canonicalize_bootstrap_address(address) is None:
            wanted, cores = math.ceil(sum(bundle.get("CPU", 0) for bundle in bundles)), os.cpu_count() or 1
            if wanted > cores:
                print(f"{len(bundles)} processes share the {cores} core(s) of this machine")
            options["num_cpus"] = max(wanted, cores)
        ray.init(address=address, **options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        where = address or os.environ.get("RAY_ADDRESS") or "this machine"
        raise ConfigError(
            "raytf needs a Ray cluster that answers and lets this process in",
            f"{where}: {first_line(error)}",
            "Check the address; where the cluster wants a token, set RAY_AUTH_MODE=token before Python starts, and "
            "RAY_AUTH_TOKEN_PATH unless the token is in ~/.ray/auth_token",
        ) from error
