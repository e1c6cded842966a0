"""Who waits for whom: judged from what all workers tell of themselves (`activity.told`). Pure.

A hang is a worker that does not come to where others wait for it. A step that is slow on all workers is none, as nobody
waits; nor is a worker that computes, as its process uses its processors, or would if its host left it any. So a worker
is named if, for the whole limit, others have waited and it has not gone on to another part of its step, and it has used
little processor time lately, and was not ready to run either.

The limit is the option, or `_TIMES_USUAL` times what a step takes usually, if that is more: steps that take 20 times as
long now and then are no hang. A part of a step that took long once, and then went on, may take twice as long from then
on. Until all have made a step there is another limit, as graphs are compiled.

It is said when the limit has passed; the run ends by it later, after `_ENDS` times the limit, or `_ENDS_LATE` times
where it may just be slow: in a callback that sends a file, an input or a checkpoint, where the training's thread still
moves now and then, or where no worker waits for it in an exchange. What is stopped (SIGSTOP) is ended by a
`process_monitor.Watchdog`, sooner.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
from collections.abc import Collection, Mapping
from typing import Any

from raytf import activity

_TIMES_USUAL = 30.0
_ENDS, _ENDS_LATE = 3.0, 30.0
# Of a processor: a process that uses as much works; threads that only ask and answer use less.
_WORKS, _WORKED_INTERVAL = 0.2, 4.0
# Those that are waited for by nobody, and those in which a worker may stand still.
_STILL = (activity.INPUT, activity.CALLBACKS, activity.CHECKPOINT, activity.CONTROLLER)
# A worker that waits is one that has done so for longer than messages and looks take.
_WAITS_INTERVAL = 1.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hang:
    """A worker that others wait for.

    Args:
        rank: of it.
        what: it does instead, as a clause that follows "it".
        seconds: for how long.
        waiting: a clause that says who waits for it, and where.
        part: of its step, for `Judge.went_on`.
        ends: whether the run is to end by it.
    """

    rank: int
    what: str
    seconds: float
    waiting: str
    part: str
    ends: bool = False

    def __str__(self) -> str:
        return f"{self.what} since {self.seconds:.0f} s; {self.waiting}"


class Turns:
    """Chooses whom to ask now: those that were not asked for longest. Pure.

    Args:
        most: how many at once, at least 1.
    """

    def __init__(self, most: int):
        self._most = most
        self._asked: dict[int, int] = {}
        self._looks = 0

    def of(self, ranks: Collection[int], everybody: bool = False) -> set[int]:
        """Returns those of `ranks` to ask at this look; all of them where `everybody` is to be asked."""
        self._looks += 1
        chosen = list(ranks)
        if not everybody and len(chosen) > self._most:
            chosen = heapq.nsmallest(self._most, chosen, key=lambda rank: (self._asked.get(rank, 0), rank))
        self._asked.update(dict.fromkeys(chosen, self._looks))
        return set(chosen)


class Judge:
    """Finds out who is waited for.

    Args:
        limit: seconds after which it is said.
        first: seconds, until all workers have made a step.
        names: of the workers, by rank; "worker 0" and so on without.
    """

    def __init__(self, limit: float, first: float, names: Mapping[int, str] | None = None):
        self._limit, self._first, self._names = limit, first, names
        self._noted: dict[int, collections.deque[Mapping[str, Any]]] = {}
        self._longest: dict[str, float] = {}

    def look(
        self,
        told: Mapping[int, Mapping[str, Any]],
        silent: Mapping[int, float],
        stopped: Mapping[int, str] | None = None,
    ) -> Hang | None:
        """Judges answers of all workers.

        Args:
            told: what each has told last, by rank.
            silent: seconds for which those have not answered that should have.
            stopped: of these, how the kernel holds a process, as a clause that follows "it is"; another one ends it.
        """
        if not told:
            return None
        for rank, its in told.items():
            self._note(rank, its)
        for rank, seconds in sorted(silent.items()):
            if seconds >= self._limit:
                return self._silent(rank, seconds, told, (stopped or {}).get(rank))
        if silent:
            return None
        waiting = {rank: its["meeting"][2] for rank, its in told.items() if its["meeting"] is not None}
        coming = [rank for rank in told if rank not in waiting]
        if waiting and coming:
            return self._not_coming(told, waiting, coming)
        if waiting:
            return self._elsewhere(told, waiting)
        return self._all_still(told)

    def went_on(self, hang: Hang) -> None:
        """Says that one that was named went on by itself."""
        self._longest[hang.part] = max(2 * hang.seconds, self._longest.get(hang.part, 0.0))

    def waiting_for(self, rank: int, told: Mapping[int, Mapping[str, Any]]) -> str:
        """Who waits for a worker, and where, as a clause; of what others told last."""
        others = [r for r, its in sorted(told.items()) if r != rank and its["meeting"] is not None]
        step = max((told[o]["step"] for o in others or told), default=0)
        return f"{self._who(others)} for it since step {step + 1}"

    def _who(self, ranks: list[int]) -> str:
        """ "worker 0 waits", "worker 0, worker 1 and worker 2 wait"; long lists are cut."""
        names = [self._names[rank] if self._names else f"worker {rank}" for rank in ranks]
        if not names:
            return "the run waits"
        if len(names) > 4:
            names[3:] = [f"{len(names) - 3} others"]
        *first, last = names
        return f"{', '.join(first)} and {last} wait" if first else f"{last} waits"

    def _note(self, rank: int, its: Mapping[str, Any]) -> None:
        seen = self._noted.setdefault(rank, collections.deque(maxlen=64))
        if not seen or its["clock"] > seen[-1]["clock"]:
            seen.append(its)

    def _since(self, rank: int, seconds: float) -> tuple[Mapping[str, Any], Mapping[str, Any] | None]:
        """(what it told last, what it told so long before, or None)."""
        last = self._noted[rank][-1]
        return last, next((s for s in reversed(self._noted[rank]) if last["clock"] - s["clock"] >= seconds), None)

    def _works(self, rank: int) -> bool:
        """Whether it has used processors lately, or was ready to and got none; unknown is yes."""
        last, before = self._since(rank, _WORKED_INTERVAL)
        if before is None:
            return True
        known = None not in (last["queued"], before["queued"])
        wanted = last["processor"] - before["processor"] + (last["queued"] - before["queued"] if known else 0.0)
        return wanted >= _WORKS * (last["clock"] - before["clock"])

    def _moves(self, rank: int, seconds: float) -> bool:
        """Whether its training thread has come to run at all in the last half of so many seconds."""
        last, before = self._since(rank, seconds / 2)
        return before is None or last["switches"] not in (None, before["switches"])

    def _limits(self, told: Mapping[int, Mapping[str, Any]], part: str) -> float:
        if any(its["step"] == 0 and its["numbers"][activity.SUM] < 2 for its in told.values()):
            return max(self._first, self._longest.get(part, 0.0))
        usual = max(its["usual"] for its in told.values())
        return max(self._limit, _TIMES_USUAL * usual, self._longest.get(part, 0.0))

    def _hang(self, rank: int, told, seconds: float, waited: float, what: str, part: str, late: bool) -> Hang | None:
        """One whose part of a step has taken `seconds`, and who was waited for so long."""
        lasted, limit = min(seconds, waited), self._limits(told, part)
        if lasted < limit:
            return None
        late = late or part in _STILL or self._moves(rank, lasted)
        ends = lasted >= limit * (_ENDS_LATE if late else _ENDS)
        return Hang(rank=rank, what=what, seconds=seconds, waiting=self.waiting_for(rank, told), part=part, ends=ends)

    def _silent(self, rank: int, seconds: float, told, stopped: str | None) -> Hang:
        what = f"is {stopped}" if stopped else "gives no answer and uses no processor: a call holds Python's lock"
        waiting, ends = self.waiting_for(rank, told), stopped is None and seconds >= _ENDS * self._limit
        return Hang(rank=rank, what=what, seconds=seconds, waiting=waiting, part="silent", ends=ends)

    def _not_coming(self, told, waiting: Mapping[int, float], coming: list[int]) -> Hang | None:
        idle = [rank for rank in coming if not self._works(rank)]
        if not idle:
            return None
        rank = max(idle, key=lambda r: (-told[r]["step"], told[r]["seconds"]))
        its = told[rank]
        # between two sums of a loop of its own, a worker is as long where it is as the others wait
        seconds = max(waiting.values()) if its["phase"] == activity.BEGIN else its["seconds"]
        return self._hang(rank, told, seconds, max(waiting.values()), describe(its), its["phase"], late=False)

    def _elsewhere(self, told, waiting: Mapping[int, float]) -> Hang | None:
        """All wait for others, and not at the same place: the one that is behind is the cause."""
        places = {its["meeting"][:2] for its in told.values()}
        if len(places) == 1:
            return None  # the network, or Ray: the ring notices a host that is gone, and its option `timeout_s` more
        rank = min(told, key=lambda r: (told[r]["step"], told[r]["numbers"][activity.SUM], -r))
        its = told[rank]
        lasted = min(waiting.values())
        others = next(o for o in told.values() if o["meeting"][:2] != its["meeting"][:2])
        what = (
            f"is in {_meeting(its)} while others are in {_meeting(others)}: it makes another number of steps, or an "
            "exchange that not all make"
        )
        return self._hang(rank, told, lasted, lasted, what, "elsewhere", late=False)

    def _all_still(self, told) -> Hang | None:
        """Nobody is in an exchange that can be seen: some stand still while others compute, or all do."""
        still = [r for r, its in told.items() if its["phase"] in _STILL and not self._works(r)]
        rest = [r for r in told if r not in still]
        ended = [r for r in rest if told[r]["phase"] not in (activity.STEP, activity.VALIDATION)]
        if not still or ended:
            return None
        rank = max(still, key=lambda r: told[r]["seconds"])
        its = told[rank]
        waited = max((told[r]["seconds"] for r in rest), default=its["seconds"])
        if rest and waited < _WAITS_INTERVAL:
            return None
        if not rest:
            waited = min(told[r]["seconds"] for r in still)
        return self._hang(rank, told, its["seconds"], waited, describe(its), its["phase"], late=not rest)


def describe(its: Mapping[str, Any]) -> str:
    """What a worker does, as a clause that follows "it"."""
    step = its["step"]
    if its["phase"] == activity.CHECKPOINT and its["failing"]:
        return f"has a checkpoint of step {step} that its storage does not take ({its['failing']})"
    return {
        activity.BEGIN: "does not come to the exchange that others are in",
        activity.INPUT: f"waits for rows of its input in step {step + 1}",
        activity.STEP: f"is in step {step + 1} and does not use its processors",
        # outside of known hooks Keras resets metrics, traces the first step of a validation, or calls a callback
        activity.CALLBACKS: f"is {'in ' + its['hook'] if its['hook'] else 'between two steps,'} after step {step}",
        activity.CHECKPOINT: f"writes a checkpoint after step {step}",
        activity.CONTROLLER: f"waits after step {step} for Ray Train's controller, which takes no report",
        activity.VALIDATION: f"is in a step of the validation after step {step} and does not use its processors",
        activity.END: f"has left the training after step {step}, so that it makes another number of steps",
    }[its["phase"]]


def _meeting(its: Mapping[str, Any]) -> str:
    kind, number, _ = its["meeting"]
    names = {
        activity.SUM: f"sum or exchange {number} (step {its['step'] + 1})",
        activity.COLLECTIVE: f"an exchange between steps (after step {its['step']})",
        activity.REPORT: f"a report (after step {its['step']})",
        activity.HEALING: f"the wait for one that takes a lost worker's place (step {its['step'] + 1})",
    }
    return names[kind]
