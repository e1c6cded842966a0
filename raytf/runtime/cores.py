"""Cores of a worker: claimed on its host, so that no two workers of any runs have the same one.

    if cores.claim(2):      # all of them, or none
        cores.keep()        # this process computes on them, and on cores without a claim
    cores.release()

A claim is a Unix socket in Linux' abstract namespace, as for ports, which ends with the process. It is not visible in
other network namespaces. That costs little: workers may use all unclaimed cores, as a thread follows the claims.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

from raytf import liveness, procfs, timeouts

# Seconds between two reads of the cores that others have claimed.
_CHECK_INTERVAL = 1.0
_AGAIN_INTERVAL = 0.001
_DOOR = "\0raytf/cpus"
_SYSTEM = pathlib.Path("/sys/devices/system/cpu")


class ClaimedCores:
    """Cores that are claimed for this process, and to which it is pinned.

    Args:
        claimed: The claimed cores.
        former: Cores that this process could use before.
        claims: Sockets of the claims; empty if another process, which outlives this one, has claimed them for it.
    """

    def __init__(self, claimed: Iterable[int], former: frozenset[int], claims: Iterable[socket.socket] = ()):
        self.claimed, self.former = frozenset(claimed), former
        self._claims, self._now = list(claims), former
        self._end, self._thread = threading.Event(), None

    @classmethod
    def claim(cls, count: int) -> ClaimedCores | None:
        """Claims `count` of the cores that the calling thread may use; None if fewer are free or outside of Linux.

        Args:
            count: Number of logical CPUs, as Ray counts them; at least 1.
        """
        if sys.platform != "linux":
            return None
        allowed = frozenset(os.sched_getaffinity(0))
        groups = {core: sharing_levels(core) for core in allowed}
        with _choice_lock():
            free = allowed - claimed_cores(allowed)
            while len(free) >= count:
                got = {core: _claimed(core) for core in choose_cores(free, count, groups)}
                if lost := {core for core, claim in got.items() if claim is None}:
                    _close(got.values())  # the lock had timed out, see `_choice_lock`
                    free -= lost
                    continue
                return cls(got, allowed, got.values())
        return None

    def keep(self) -> None:
        """Keeps the threads of this process off cores that others have claimed, including threads that it starts later.

        Threads with other cores than this process had stay unchanged.
        """
        if self._thread is None:
            self._check()
            self._thread = threading.Thread(target=self._watch, name="raytf-cores", daemon=True)
            self._thread.start()

    def _watch(self) -> None:
        while not self._end.wait(_CHECK_INTERVAL):
            self._check()

    def _check(self) -> None:
        self._move(self.former - claimed_cores(self.former - self.claimed))

    def _move(self, cores: frozenset[int]) -> None:
        if cores != self._now:
            _move_threads(self._now, cores)
            self._now = cores

    def close(self) -> None:
        """Releases the cores, and restores the process's former ones."""
        self._end.set()
        if self._thread is not None:
            self._thread.join()
            self._move(self.former)
        _close(self._claims)


_current: list[ClaimedCores] = []


def claim_cores(count: int) -> bool:
    """Claims cores for this process, see `ClaimedCores.claim`; returns whether it has some. 0 only releases cores."""
    release_cores()
    cores = ClaimedCores.claim(count) if count else None
    _current.extend([] if cores is None else [cores])
    return cores is not None


def enforce_cores() -> None:
    """Pins this process to the cores that it has claimed and to unclaimed ones."""
    _current[0].keep()


def adopt_cores(claimed: Iterable[int]) -> None:
    """Pins this process to cores that another process, which outlives it, has claimed for it."""
    _current[:] = [ClaimedCores(claimed, frozenset(os.sched_getaffinity(0)))]
    enforce_cores()


def release_cores() -> None:
    """Releases the cores that this process has claimed; it may use its former ones."""
    while _current:
        _current.pop().close()


def count_usable() -> int:
    """Returns the number of cores that this process may use now."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def own_cores() -> frozenset[int]:
    """Returns the cores that this process has claimed."""
    return _current[0].claimed if _current else frozenset()


def cores_before() -> frozenset[int] | None:
    """Returns the cores that this process could use before it claimed some; None if it has claimed none.

    Child processes that do not train belong on these.
    """
    return _current[0].former if _current else None


def agree_on_pinning(addresses: Sequence[str], have: Sequence[bool]) -> list[bool]:
    """Returns for each worker whether it is pinned to its cores: only if all workers of its host have some.

    A worker that shares a core while others do not would be the straggler.

    Args:
        addresses: "host:port" of the workers of a run.
        have: Whether each worker has claimed cores.
    """
    hosts = [address.rpartition(":")[0] for address in addresses]
    unpinned_hosts = {host for host, has in zip(hosts, have, strict=True) if not has}
    return [host not in unpinned_hosts for host in hosts]


def claimed_cores(candidates: Iterable[int]) -> frozenset[int]:
    """Returns those of some cores that any process has claimed on this host."""
    result = set()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        for core in candidates:
            try:
                probe.connect(_name(core))
            except ConnectionRefusedError:
                continue
            except OSError:  # another program's socket, of another kind
                pass
            result.add(core)
    return frozenset(result)


def choose_cores(free: frozenset[int], count: int, levels: Mapping[int, list[frozenset[int]]]) -> list[int]:
    """Returns `count` free cores that share most with each other, and little with other processes' cores.

    Args:
        free: Free cores.
        count: Number of cores, at most the number of free ones.
        levels: By core, the groups of cores with which it shares hardware, see the function `sharing_levels`.
    """
    everything = frozenset(levels)
    groups_of = {core: sorted({*levels[core], everything}, key=len) for core in free}

    def shared(core: int, outer: frozenset[int]) -> tuple:
        """Returns (minus the number of free cores, the first core) of each group, from large to small."""
        return tuple((-len(group & free), min(group)) for group in reversed(groups_of[core]) if group < outer)

    def wide(group: frozenset[int]) -> tuple:
        return tuple(-len(larger & free) for larger in groups_of[min(group & free)] if group < larger)

    fitting = {group for groups in groups_of.values() for group in groups if len(group & free) >= count}
    best = min(fitting, key=lambda group: (len(group), -len(group & free), wide(group), min(group)))
    return sorted(best & free, key=lambda core: (shared(core, best), core))[:count]


def sharing_levels(core: int, system: pathlib.Path = _SYSTEM) -> list[frozenset[int]]:
    """Returns the groups of cores that contain `core` and share a physical core, a cache or a NUMA node."""
    folder = system / f"cpu{core}"
    files = [folder / "topology/thread_siblings_list", *folder.glob("cache/index*/shared_cpu_list")]
    files += folder.glob("node*/cpulist")
    groups = {_parse_list(file.read_text()) for file in files if file.exists()}
    return [group for group in groups if core in group]


def _parse_list(text: str) -> frozenset[int]:
    """Parses the cores of a list like "0-3,8"."""
    parts = [part.partition("-") for part in text.strip().split(",") if part]
    return frozenset(core for first, _, last in parts for core in range(int(first), int(last or first) + 1))


def _move_threads(was: frozenset[int], target: frozenset[int]) -> None:
    """Moves those threads of this process that may use the cores `was` to the cores `target`."""
    # repeated: a thread that starts meanwhile inherits its parent's cores
    while sum(_moved(thread, was, target) for thread in procfs.thread_ids()):
        pass


def _moved(thread: int, was: frozenset[int], target: frozenset[int]) -> bool:
    try:
        if os.sched_getaffinity(thread) != was:
            return False
        os.sched_setaffinity(thread, target)
    except ProcessLookupError:
        return False
    except OSError as error:
        if error.errno != errno.EINVAL:  # an administrator has removed these cores from its cgroup
            raise
        return False
    return True


def _name(core: int) -> str:
    return f"\0raytf/cpu/{core}"


def _claimed(core: int) -> socket.socket | None:
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(_name(core))
    except OSError:
        claim.close()
        return None
    return claim


def _close(claims) -> None:
    for claim in claims:
        if claim is not None:
            claim.close()


@contextlib.contextmanager
def _choice_lock() -> Iterator[None]:
    """Prevents other processes of this host from choosing cores meanwhile, so that each gets cores that share hardware.

    A suspended process is not waited for: claims are exclusive by themselves.
    """
    with socket.socket(socket.AF_UNIX) as door:
        deadline = time.monotonic() + timeouts.get().core_claim
        while (remaining := deadline - time.monotonic()) > 0:
            try:
                door.bind(_DOOR)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    break
                if not _waited_for_chooser(remaining):
                    break
                continue
            door.listen(128)
            break
        yield


def _waited_for_chooser(seconds: float) -> bool:
    """Waits until the process that chooses cores is done; returns whether it belongs to this user."""
    with socket.socket(socket.AF_UNIX) as waiting:
        waiting.settimeout(seconds)
        try:
            waiting.connect(_DOOR)
            if not liveness.is_same_user(waiting):
                return False
            waiting.recv(1)  # no process accepts this connection: it ends when the other process closes its door
        except OSError as error:  # it is done meanwhile, or about to listen; otherwise it is no door
            if error.errno not in (errno.ECONNREFUSED, errno.ECONNRESET, None):
                return False
            time.sleep(_AGAIN_INTERVAL)
    return True
