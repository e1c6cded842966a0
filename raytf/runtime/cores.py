"""Cores of a worker: claimed by host, so that no two workers of it, of whatever run, have the same one.

    if cores.claim(2):      # all that it wants, or none
        cores.keep()        # this process computes there, and on cores that nobody has claimed
    cores.release()

A claim is a Unix socket in Linux' abstract namespace, as that of a port is (`ports.py`): it is no file, and ends with
the process. Claims of another network namespace, as containers have, are not seen. That costs little, as a worker is
kept off other workers' cores only: it may use each that nobody has claimed, for threads that read rows and for Ray's.
So where a host's workers have all of it, each has its own cores alone, and where cores are left over, pinning leaves
none of them idle. As claims come and go, a thread widens and narrows that.
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

# Between two looks at which cores others have claimed.
_LOOK_INTERVAL = 1.0
_AGAIN_INTERVAL = 0.001
_DOOR = "\0raytf/cpus"
_SYSTEM = pathlib.Path("/sys/devices/system/cpu")


class Cores:
    """Cores that are claimed for this process, which is kept to them.

    Args:
        own: which they are.
        before: what this process could use before.
        claims: what holds them; nothing where another process, which outlives this one, has claimed them for it.
    """

    def __init__(self, own: Iterable[int], before: frozenset[int], claims: Iterable[socket.socket] = ()):
        self.own, self.before = frozenset(own), before
        self._claims, self._now = list(claims), before
        self._end, self._thread = threading.Event(), None

    @classmethod
    def claim(cls, count: int) -> Cores | None:
        """Claims so many of the cores that the calling thread may use; None where fewer are free, or this is not Linux.

        Args:
            count: of logical CPUs, as Ray counts them; at least 1.
        """
        if sys.platform != "linux":
            return None
        before = frozenset(os.sched_getaffinity(0))
        found = {core: levels(core) for core in before}
        with _one_at_a_time():
            free = before - claimed(before)
            while len(free) >= count:
                got = {core: _claimed(core) for core in choose(free, count, found)}
                if lost := {core for core, claim in got.items() if claim is None}:
                    _close(got.values())  # another was not waited for, see `_one_at_a_time`
                    free -= lost
                    continue
                return cls(got, before, got.values())
        return None

    def keep(self) -> None:
        """Keeps the threads of this process off cores that others have claimed, those that it starts later included.

        Threads that have other cores than this process had are left alone.
        """
        if self._thread is None:
            self._look()
            self._thread = threading.Thread(target=self._watch, name="raytf-cores", daemon=True)
            self._thread.start()

    def _watch(self) -> None:
        while not self._end.wait(_LOOK_INTERVAL):
            self._look()

    def _look(self) -> None:
        self._move(self.before - claimed(self.before - self.own))

    def _move(self, to: frozenset[int]) -> None:
        if to != self._now:
            _move_threads(self._now, to)
            self._now = to

    def close(self) -> None:
        """Gives the cores back, and the process what it had before."""
        self._end.set()
        if self._thread is not None:
            self._thread.join()
            self._move(self.before)
        _close(self._claims)


_mine: list[Cores] = []


def claim(count: int) -> bool:
    """Claims cores for this process, see `Cores.claim`; whether it has them. Of 0 it claims and has none."""
    release()
    found = Cores.claim(count) if count else None
    _mine.extend([] if found is None else [found])
    return found is not None


def keep() -> None:
    """Keeps this process to the cores that it has claimed, and to those that nobody has."""
    _mine[0].keep()


def adopt(own: Iterable[int]) -> None:
    """Keeps this process to cores that another one, which outlives it, has claimed for it."""
    _mine[:] = [Cores(own, frozenset(os.sched_getaffinity(0)))]
    keep()


def release() -> None:
    """Gives back what this process has claimed; it may compute where it could before."""
    while _mine:
        _mine.pop().close()


def own() -> frozenset[int]:
    """What this process has claimed."""
    return _mine[0].own if _mine else frozenset()


def before() -> frozenset[int] | None:
    """Where this process could compute before it claimed cores; None where it has claimed none.

    A process that it starts, and that does not train, belongs there.
    """
    return _mine[0].before if _mine else None


def agreed(addresses: Sequence[str], have: Sequence[bool]) -> list[bool]:
    """Whether each worker keeps to its cores: where all of its host have some.

    One that shares a core while others have theirs alone would be the slowest, for which all wait.

    Args:
        addresses: "host:port" of the workers of a run.
        have: whether each has claimed cores.
    """
    hosts = [address.rpartition(":")[0] for address in addresses]
    without = {host for host, has in zip(hosts, have, strict=True) if not has}
    return [host not in without for host in hosts]


def claimed(among: Iterable[int]) -> frozenset[int]:
    """Those of some cores that are claimed on this host, by anybody."""
    found = set()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as asks:
        for core in among:
            try:
                asks.connect(_name(core))
            except ConnectionRefusedError:
                continue
            except OSError:  # a stranger's socket, of another kind
                pass
            found.add(core)
    return frozenset(found)


def choose(free: frozenset[int], count: int, levels: Mapping[int, list[frozenset[int]]]) -> list[int]:
    """So many of the free cores that share as much as they can among each other, and little with what others have.

    Args:
        free: the free ones.
        count: at most as many as those.
        levels: by core the sets of cores with which it shares something, see the function of this name.
    """
    everything = frozenset(levels)
    around = {core: sorted({*levels[core], everything}, key=len) for core in free}

    def shared(core: int, within: frozenset[int]) -> tuple:
        """From what is shared by many to what is shared by few: how much of it is free, and which it is."""
        return tuple((-len(group & free), min(group)) for group in reversed(around[core]) if group < within)

    def wide(group: frozenset[int]) -> tuple:
        return tuple(-len(one & free) for one in around[min(group & free)] if group < one)

    fitting = {group for groups in around.values() for group in groups if len(group & free) >= count}
    best = min(fitting, key=lambda group: (len(group), -len(group & free), wide(group), min(group)))
    return sorted(best & free, key=lambda core: (shared(core, best), core))[:count]


def levels(core: int, system: pathlib.Path = _SYSTEM) -> list[frozenset[int]]:
    """The cores that share a physical core, a cache or a NUMA node with one, itself included, as Linux tells."""
    here = system / f"cpu{core}"
    files = [here / "topology/thread_siblings_list", *here.glob("cache/index*/shared_cpu_list")]
    files += here.glob("node*/cpulist")
    found = {_listed(file.read_text()) for file in files if file.exists()}
    return [group for group in found if core in group]


def _listed(text: str) -> frozenset[int]:
    """The cores of a list like "0-3,8"."""
    parts = [part.partition("-") for part in text.strip().split(",") if part]
    return frozenset(core for first, _, last in parts for core in range(int(first), int(last or first) + 1))


def _move_threads(was: frozenset[int], to: frozenset[int]) -> None:
    """Has those threads of this process that may use certain cores use others."""
    # again: one that is started meanwhile has what its starter has
    while sum(_moved(thread, was, to) for thread in procfs.threads()):
        pass


def _moved(thread: int, was: frozenset[int], to: frozenset[int]) -> bool:
    try:
        if os.sched_getaffinity(thread) != was:
            return False
        os.sched_setaffinity(thread, to)
    except ProcessLookupError:
        return False
    except OSError as error:
        if error.errno != errno.EINVAL:  # an administrator has taken these cores from its cgroup
            raise
        return False
    return True


def _name(core: int) -> str:
    return f"\0raytf/cpu/{core}"


def _claimed(core: int) -> socket.socket | None:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        made.bind(_name(core))
    except OSError:
        made.close()
        return None
    return made


def _close(claims) -> None:
    for one in claims:
        if one is not None:
            one.close()


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Within it no other process of this host chooses cores, so that each has those that belong together.

    One that stands still in between is not waited for: claims are exclusive by themselves.
    """
    with socket.socket(socket.AF_UNIX) as door:
        until = time.monotonic() + timeouts.get().core_claim
        while (left := until - time.monotonic()) > 0:
            try:
                door.bind(_DOOR)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    break
                if not _waited_for_door(left):
                    break
                continue
            door.listen(128)
            break
        yield


def _waited_for_door(seconds: float) -> bool:
    """Waits until the process that chooses cores is done; returns whether it is one of this user to wait for."""
    with socket.socket(socket.AF_UNIX) as waiting:
        waiting.settimeout(seconds)
        try:
            waiting.connect(_DOOR)
            if not liveness.is_own_peer(waiting):
                return False
            waiting.recv(1)  # nobody takes this connection: it ends when the other one closes its door
        except OSError as error:  # it is done meanwhile, or is about to listen; else it is no door
            if error.errno not in (errno.ECONNREFUSED, errno.ECONNRESET, None):
                return False
            time.sleep(_AGAIN_INTERVAL)
    return True
