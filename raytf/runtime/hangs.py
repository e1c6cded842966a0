"""Hang detection: finds the worker that others wait for, from snapshots of all workers. Pure.

A worker is named if, for the whole limit, others waited, and it stayed in one part of its step. It also used little
processor time, and was not ready to run. The limit is the option, or `_TIMES_USUAL` usual steps if more: some steps
take 20 times as long. A part that took long once, and then continued, may later take twice as long. The worker's
process is ended after `_ENDS` times the limit, or `_ENDS_SLOW` times if the worker may just be slow. A
`process_monitor.ProcessKiller` ends stopped processes (SIGSTOP) sooner. See docs/design/hang-detection.md.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
from collections.abc import Collection, Mapping
from typing import Any

from raytf import activity

_TIMES_USUAL = 30.0
_ENDS, _ENDS_SLOW = 3.0, 30.0
# Share of a processor above which a process computes, and seconds to measure it; threads that only send and answer use
# less.
_WORKS, _WORKED_INTERVAL = 0.2, 4.0
# Phases for which no other worker waits, and in which a worker may hang.
_PAUSES = (activity.INPUT, activity.CALLBACKS, activity.CHECKPOINT, activity.DRIVER)
# Largest difference in seconds of two values of the begin of one phase.
_SAME_PHASE = 0.01
# Seconds after which a worker counts as waiting: longer than messages and polls take.
_WAITS_INTERVAL = 1.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class HangReport:
    """A worker that others wait for.

    Args:
        rank: Rank of the worker.
        activity_clause: Its current activity, as a clause that follows "it".
        seconds: Duration of that activity.
        waiting: Clause with the workers that wait for it, and since which step.
        part: Part of its step, for `HangDetector.record_continued`.
        ends: Whether the run ends because of it.
        began: Begin of its phase on the worker's clock, in seconds; None if phases do not show whether it continues.
    """

    rank: int
    activity_clause: str
    seconds: float
    waiting: str
    part: str
    ends: bool = False
    began: float | None = None

    def lasts(self, snapshot: Mapping[str, Any]) -> bool:
        """Returns whether the worker's snapshot shows the phase of the report.

        Another thread of its process may have used a processor, or may have been queued for one. Then no hang is
        detected for a moment.
        """
        return self.began is not None and abs(_phase_begin(snapshot) - self.began) < _SAME_PHASE

    def __str__(self) -> str:
        return f"{self.activity_clause} since {self.seconds:.0f} s; {self.waiting}"


class PollOrder:
    """Chooses the workers to poll: those that were not polled for longest. Pure.

    Args:
        most: Largest number per poll, at least 1.
    """

    def __init__(self, most: int):
        self._limit = most
        self._last_polled: dict[int, int] = {}
        self._polls = 0

    def next_ranks(self, ranks: Collection[int], everybody: bool = False) -> set[int]:
        """Returns those of `ranks` to poll now; all of them if `everybody` is True."""
        self._polls += 1
        chosen = list(ranks)
        if not everybody and len(chosen) > self._limit:
            chosen = heapq.nsmallest(self._limit, chosen, key=lambda rank: (self._last_polled.get(rank, 0), rank))
        self._last_polled.update(dict.fromkeys(chosen, self._polls))
        return set(chosen)


class HangDetector:
    """Finds the worker that others wait for.

    Args:
        limit: Seconds after which a hang is reported.
        first: The same in seconds, until all workers have made a step.
        names: Names of the workers, by rank; default "worker 0" and so on.
    """

    def __init__(self, limit: float, first: float, names: Mapping[int, str] | None = None):
        self._limit, self._first, self._names = limit, first, names
        self._history: dict[int, collections.deque[Mapping[str, Any]]] = {}
        self._longest: dict[str, float] = {}

    def detect(
        self,
        snapshots: Mapping[int, Mapping[str, Any]],
        silent: Mapping[int, float],
        stopped: Mapping[int, str] | None = None,
    ) -> HangReport | None:
        """Finds a hang in the snapshots of all workers.

        Args:
            snapshots: Last snapshot of each worker, by rank.
            silent: Seconds without an answer of workers that are overdue, by rank.
            stopped: How the kernel stops some of these, as a clause after "it is"; the `ProcessKiller` ends them.
        """
        if not snapshots:
            return None
        for rank, snapshot in snapshots.items():
            self._record(rank, snapshot)
        for rank, seconds in sorted(silent.items()):
            if seconds >= self._limit:
                return self._silent(rank, seconds, snapshots, (stopped or {}).get(rank))
        if silent:
            return None
        waiting = {
            rank: snapshot["collective"][2]
            for rank, snapshot in snapshots.items()
            if snapshot["collective"] is not None
        }
        coming = [rank for rank in snapshots if rank not in waiting]
        if waiting and coming:
            return self._find_missing(snapshots, waiting, coming)
        if waiting:
            return self._find_divergent(snapshots, waiting)
        return self._find_idle(snapshots)

    def record_continued(self, hang: HangReport) -> None:
        """Records that a named worker continued by itself."""
        self._longest[hang.part] = max(2 * hang.seconds, self._longest.get(hang.part, 0.0))

    def describe_waiting(self, rank: int, snapshots: Mapping[int, Mapping[str, Any]]) -> str:
        """Returns a clause about the workers that wait for a worker, and since which step, from the last snapshots."""
        waiting = [r for r, snapshot in sorted(snapshots.items()) if r != rank and snapshot["collective"] is not None]
        step = max((snapshots[o]["step"] for o in waiting or snapshots), default=0)
        return f"{self._describe_waiters(waiting)} for it since step {step + 1}"

    def _describe_waiters(self, ranks: list[int]) -> str:
        """Returns "worker 0 waits", or "worker 0, worker 1 and worker 2 wait"; long lists are cut."""
        names = [self._names[rank] if self._names else f"worker {rank}" for rank in ranks]
        if not names:
            return "the run waits"
        if len(names) > 4:
            names[3:] = [f"{len(names) - 3} others"]
        *first, last = names
        return f"{', '.join(first)} and {last} wait" if first else f"{last} waits"

    def _record(self, rank: int, snapshot: Mapping[str, Any]) -> None:
        seen = self._history.setdefault(rank, collections.deque(maxlen=64))
        if not seen or snapshot["clock"] > seen[-1]["clock"]:
            seen.append(snapshot)

    def _snapshots_since(self, rank: int, seconds: float) -> tuple[Mapping[str, Any], Mapping[str, Any] | None]:
        """Returns (its last snapshot, its snapshot `seconds` earlier, or None)."""
        last = self._history[rank][-1]
        return last, next((s for s in reversed(self._history[rank]) if last["clock"] - s["clock"] >= seconds), None)

    def _works(self, rank: int) -> bool:
        """Returns whether it has used processors lately, or was ready to run without one; True if unknown."""
        last, earlier = self._snapshots_since(rank, _WORKED_INTERVAL)
        if earlier is None:
            return True
        known = None not in (last["queued"], earlier["queued"])
        wanted = last["processor"] - earlier["processor"] + (last["queued"] - earlier["queued"] if known else 0.0)
        return wanted >= _WORKS * (last["clock"] - earlier["clock"])

    def _makes_progress(self, rank: int, seconds: float) -> bool:
        """Returns whether its training thread has run at all in the last half of `seconds`."""
        last, earlier = self._snapshots_since(rank, seconds / 2)
        return earlier is None or last["switches"] not in (None, earlier["switches"])

    def _limits(self, snapshots: Mapping[int, Mapping[str, Any]], part: str) -> float:
        if any(snapshot["step"] == 0 and snapshot["numbers"][activity.SUM] < 2 for snapshot in snapshots.values()):
            return max(self._first, self._longest.get(part, 0.0))
        usual = max(snapshot["usual"] for snapshot in snapshots.values())
        return max(self._limit, _TIMES_USUAL * usual, self._longest.get(part, 0.0))

    def _report(
        self, rank: int, snapshots, seconds: float, waited: float, activity_clause: str, part: str, is_slow: bool
    ) -> HangReport | None:
        """Returns a hang if `seconds` in one part, and the `waited` seconds of others, exceed the limit."""
        lasted, limit = min(seconds, waited), self._limits(snapshots, part)
        if lasted < limit:
            return None
        is_slow = is_slow or part in _PAUSES or self._makes_progress(rank, lasted)
        ends = lasted >= limit * (_ENDS_SLOW if is_slow else _ENDS)
        return HangReport(
            rank=rank,
            activity_clause=activity_clause,
            seconds=seconds,
            waiting=self.describe_waiting(rank, snapshots),
            part=part,
            ends=ends,
            began=_phase_begin(snapshots[rank]) if part == snapshots[rank]["phase"] != activity.BEGIN else None,
        )

    def _silent(self, rank: int, seconds: float, snapshots, stopped: str | None) -> HangReport:
        clause = f"is {stopped}" if stopped else "gives no answer and uses no processor: a call holds Python's lock"
        waiting, ends = self.describe_waiting(rank, snapshots), stopped is None and seconds >= _ENDS * self._limit
        return HangReport(rank=rank, activity_clause=clause, seconds=seconds, waiting=waiting, part="silent", ends=ends)

    def _find_missing(self, snapshots, waiting: Mapping[int, float], coming: list[int]) -> HangReport | None:
        idle = [rank for rank in coming if not self._works(rank)]
        if not idle:
            return None
        rank = max(idle, key=lambda r: (-snapshots[r]["step"], snapshots[r]["seconds"]))
        snapshot = snapshots[rank]
        # between two sums of a custom loop, a worker is late for as long as the others wait
        seconds = max(waiting.values()) if snapshot["phase"] == activity.BEGIN else snapshot["seconds"]
        return self._report(
            rank,
            snapshots,
            seconds,
            max(waiting.values()),
            describe_activity(snapshot),
            snapshot["phase"],
            is_slow=False,
        )

    def _find_divergent(self, snapshots, waiting: Mapping[int, float]) -> HangReport | None:
        """Finds the cause if all wait, but in different collectives: the worker with the fewest steps."""
        collectives = {state["collective"][:2] for state in snapshots.values()}
        if len(collectives) == 1:
            return None  # the network or Ray: the ring detects a lost host, and its option `timeout_s` more
        rank = min(snapshots, key=lambda r: (snapshots[r]["step"], snapshots[r]["numbers"][activity.SUM], -r))
        state = snapshots[rank]
        lasted = min(waiting.values())
        advanced = next(o for o in snapshots.values() if o["collective"][:2] != state["collective"][:2])
        clause = (
            f"is in {_describe_collective(state)} while others are in {_describe_collective(advanced)}: "
            "it makes another number of steps, or an exchange that not all make"
        )
        return self._report(rank, snapshots, lasted, lasted, clause, "elsewhere", is_slow=False)

    def _find_idle(self, snapshots) -> HangReport | None:
        """Finds a hang without a visible collective: some workers are idle while others compute, or all are idle."""
        idle_ranks = [r for r, snapshot in snapshots.items() if snapshot["phase"] in _PAUSES and not self._works(r)]
        active = [r for r in snapshots if r not in idle_ranks]
        ended = [r for r in active if snapshots[r]["phase"] not in (activity.STEP, activity.VALIDATION)]
        if not idle_ranks or ended:
            return None
        rank = max(idle_ranks, key=lambda r: snapshots[r]["seconds"])
        snapshot = snapshots[rank]
        waited = max((snapshots[r]["seconds"] for r in active), default=snapshot["seconds"])
        if active and waited < _WAITS_INTERVAL:
            return None
        if not active:
            waited = min(snapshots[r]["seconds"] for r in idle_ranks)
        return self._report(
            rank,
            snapshots,
            snapshot["seconds"],
            waited,
            describe_activity(snapshot),
            snapshot["phase"],
            is_slow=not active,
        )


def _phase_begin(snapshot: Mapping[str, Any]) -> float:
    """Returns the begin of a worker's phase on its clock, in seconds."""
    return snapshot["clock"] - snapshot["seconds"]


def describe_activity(snapshot: Mapping[str, Any]) -> str:
    """Returns a worker's current activity, as a clause that follows "it"."""
    step = snapshot["step"]
    if snapshot["phase"] == activity.CHECKPOINT and snapshot["failing"]:
        return f"has a checkpoint of step {step} that its storage does not take ({snapshot['failing']})"
    hook = f"in {snapshot['hook']}" if snapshot["hook"] else "between two steps,"
    return {
        activity.BEGIN: "does not come to the exchange that others are in",
        activity.INPUT: f"waits for rows of its input in step {step + 1}",
        activity.STEP: f"is in step {step + 1} and does not use its processors",
        # outside of known hooks Keras resets metrics, traces the first step of a validation, or calls a callback
        activity.CALLBACKS: f"is {hook} after step {step}",
        activity.CHECKPOINT: f"writes a checkpoint after step {step}",
        activity.DRIVER: f"waits after step {step} for the driver, which takes no report",
        activity.VALIDATION: f"is in a step of the validation after step {step} and does not use its processors",
        activity.END: f"has left the training after step {step}, so that it makes another number of steps",
    }[snapshot["phase"]]


def _describe_collective(snapshot: Mapping[str, Any]) -> str:
    kind, number, _ = snapshot["collective"]
    names = {
        activity.SUM: f"sum or exchange {number} (step {snapshot['step'] + 1})",
        activity.COLLECTIVE: f"an exchange between steps (after step {snapshot['step']})",
        activity.REPORT: f"a report (after step {snapshot['step']})",
        activity.RECOVERY: f"the wait for a replacement worker (step {snapshot['step'] + 1})",
    }
    return names[kind]
