"""Heals a group of workers in place: processes take the places of those that were lost, and the others go on. Driver.

A thread of Ray Train's controller does it, as it takes seconds, while the controller polls the others; the leader of a
trial's workers waits for it. What the workers do meanwhile says `raytf.collectives.healing`. Where it cannot be done,
all workers restart from the last checkpoint, as without it; which of the two happens is said, and why.
Where only a process is missing, as no node has room for it, the others keep a checkpoint of the step that they stand
behind first, so that no step before it is made again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import ray

from raytf import events, timeouts
from raytf.collectives import healing, ring
from raytf.collectives.healing import Rejoin, ReplacementState, Waiting
from raytf.compat import ray_train
from raytf.compat.ray_train import WorkerGroupStartupFailedError
from raytf.errors import RaytfError, in_a_line
from raytf.events import Kind, RunEvent, names
from raytf.runtime import answers, ports
from raytf.runtime.answers import NoAnswerError
from raytf.runtime.failures import cause_of, is_consequence
from raytf.timeouts import Pace
from raytf.train import backend, decisions
from raytf.train.decisions import Action, Do

# For which a worker that does not wait so far holds an answer back; it answers nobody else meanwhile.
_LOOK_INTERVAL = 0.1
# Between two looks at whether there is room for a process.
_ROOM_INTERVAL = 0.5

# What follows the loss of a worker then.
TAKES_ITS_PLACE = ". A replacement worker is started; the other workers wait in their step"


class NotHealedError(RaytfError, RuntimeError):
    """The loss of a worker cannot be healed in place; the message says why, as a clause."""


class _AnotherLostError(RaytfError, RuntimeError):
    """Another worker was lost meanwhile."""


class Member(Protocol):
    """A worker: `Worker` of Ray Train is one.

    Attributes:
        actor: has an `execute(function, *arguments)`.
    """

    actor: Any


@dataclass(frozen=True)
class Asked:
    """What a healing asks of the group of workers.

    Args:
        workers: the `Member` of each rank.
        place: place(rank) starts a process in the place of a lost one.
        started: started({rank: Worker}) gives new processes what they need before all else.
        settle: settle(worker, addresses of all, rank, token, whether cores are pinned) tells a new process what
            `backend.set_environment` takes; the ref of its answer.
        begin: begin(worker) has a new process train.
        standing: standing(worker, seconds) gives the ref of what `Healer.waiting(seconds)` says there, and of what its
            training has failed of or None.
        ports: on which workers may listen.
        cores: that each claims.
        reported: reports that have come, by rank.
        has_room: has_room(ranks): whether processes can start in these places, where a run can go on with fewer; None
            where it cannot, and is to wait.
    """

    workers: Mapping[int, Member]
    place: Callable[[int], Member]
    started: Callable[[dict[int, Member]], None]
    settle: Callable[[Member, list[str], int, bytes, bool], Any]
    begin: Callable[[Member], None]
    standing: Callable[[Member, float], Any]
    ports: tuple[int, int]
    cores: int
    reported: Mapping[int, int]
    has_room: Callable[[Iterable[int]], bool] | None = None


class Healing:
    """The healing of a loss, in a thread of its own from the start.

    Args:
        asked: see `Asked`.
        lost: ranks whose places are to be taken; none where all live, and have lost their connections.
        generation: of the next ring.

    Attributes:
        lost: these ranks.
        done: whether it has ended, well or not.
        healed: whether it has ended well.
        new: the workers that took the places, once it is done; {} if it could not be done.
        why: why not, as a clause.
        another: whether another worker was lost meanwhile, so that it may be begun anew.
        also: ranks of such, of those that were not lost before.
        new_lost: how many of the processes that were to take a place.
        kept: steps in all after which the others have kept a checkpoint, as it could not be done; or None.
        behind: ranks whose own part of that is of the step before.
        not_kept: why they have not, as a clause, where `why` does not say it; or "".
    """

    def __init__(self, asked: Asked, lost: Iterable[int], generation: int):
        self._asked, self.lost, self._generation = asked, frozenset(lost), generation
        self._rest = {rank: worker for rank, worker in asked.workers.items() if rank not in lost}
        self._made: dict[int, Member] = {}
        self.new: dict[int, Member] = {}
        self.healed = False
        self.why, self.another, self.new_lost = "", False, 0
        self.also: set[int] = set()
        self.kept: int | None = None
        self.not_kept = ""
        self.behind: list[int] = []
        self._held: list[bytes] | None = None  # what each worker, the lost ones too, had for itself, by rank
        self._lock, self._given_up = threading.Lock(), False
        self._pace = Pace()
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._run, daemon=True, name="raytf_healing")
        self._thread.start()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def _run(self) -> None:
        if not self.lost:
            events.emit(RunEvent(kind=Kind.WORKERS_DISCONNECTED))
        try:
            self._heal()
            self.new, self.healed = self._made, True
            kind = Kind.WORKER_REPLACED if self.lost else Kind.WORKERS_RECONNECTED
            seconds = time.monotonic() - self._began
            events.emit(RunEvent(kind=kind, ranks=tuple(sorted(self.lost)), seconds=seconds))
        except Exception as error:  # nobody else would hear of it, and the run must go on by its checkpoint
            self.why = _said(error)
            self.another = isinstance(error, (ray.exceptions.RayActorError, _AnotherLostError))
            if self.another:
                self._see_who_is_lost()
            else:
                self._keep()
            with self._lock:
                self._given_up = True
                for worker in self._made.values():
                    ray.kill(worker.actor)
            if not isinstance(error, (RaytfError, ray.exceptions.RayError, WorkerGroupStartupFailedError, OSError)):
                raise

    def another_is_lost(self, ranks: set[int]) -> None:
        """Says that workers were lost since it began, so that it ends at once."""
        self.also |= ranks

    def _see_who_is_lost(self) -> None:
        with self._lock:
            made = dict(self._made)
        self.also |= self._dead(self._rest)
        gone = self._dead(made)
        self.new_lost = len(gone)
        found = [names(self.also)] if self.also else []
        found += [f"the process that was to become worker {rank}" for rank in sorted(gone)]
        if found:
            self.why = f"{' and '.join(found)} was lost"

    def _dead(self, workers: Mapping[int, Member]) -> set[int]:
        """The ranks of those whose processes have ended."""
        refs = {self._asked.standing(worker, 0.0): rank for rank, worker in workers.items()}
        found = set()
        with contextlib.suppress(NoAnswerError):  # one that stands still is seen by the watchdog
            for _, ref in answers.as_they_come(list(refs), timeouts.get().sign_of_life, "whether it lives"):
                try:
                    ray.get(ref)
                except ray.exceptions.RayActorError:
                    found.add(refs[ref])
        return found

    @property
    def place(self) -> str:
        """Where all start anew from, as it could not be done."""
        if self.kept is None:
            return f"the last checkpoint{self.not_kept and f', as {self.not_kept}'}"
        lacks = f"; metrics of the epoch lack the rows of {names(self.behind)} in that step" if self.behind else ""
        return f"step {self.kept}, of which the others have kept a checkpoint{lacks}"

    def wait(self) -> None:
        """Waits for its end; each of its parts has a deadline."""
        self._thread.join()

    def give_up(self) -> None:
        """Tells those that wait that there is no other ring."""
        give_up(self._rest.values(), self.why)

    def _keep(self) -> None:
        """Has one of the others keep a checkpoint of what all hold, unless they may have gone on."""
        if self._held is None:
            return
        try:
            refs = [self._rest[min(self._rest)].actor.execute.remote(healing.keep, self._held, self.behind)]
            seconds = self._pace.deadline(timeouts.get().recovery_checkpoint, copies=1)
            (self.kept,) = answers.collect(refs, seconds, "a checkpoint of the last step that all have made")
        except (RaytfError, ray.exceptions.RayError) as error:  # they start anew from the last one
            self.not_kept = _said(error)

    def _heal(self) -> None:
        starting = threading.Thread(target=self._start, daemon=True)
        self._failed: BaseException | None = None
        if self.lost:
            starting.start()
        if self._generation > 1:  # one that was lost may have been told of a ring that is waited for since
            told = [worker.actor.execute.remote(healing.leave, self._generation - 1) for worker in self._rest.values()]
            self._ask(told, "an end of what went before")
        told = [worker.actor.execute.remote(healing.pace) for worker in self._rest.values()]
        self._pace = Pace.slowest(self._ask(told, "how large its training is"))
        seconds = self._pace.deadline(timeouts.get().recovery_break, first_steps=1)
        waiting = self._all_wait(self._rest, seconds, "come to the sum that cannot be made")
        anew = is_to_be_made_anew(waiting, self.lost, len(self._asked.workers))
        if self.lost:
            self._replace(starting, waiting, anew)
        self._held = None  # from here on they may go on
        told = Rejoin(
            [waiting[rank].address for rank in sorted(waiting)],
            ring.new_token(),
            self._generation,
            {kind: max(its.numbers[kind] for its in waiting.values()) for kind in waiting[min(waiting)].numbers},
            anew,
        )
        everyone = self._rest | self._made
        self._ask([worker.actor.execute.remote(healing.command, told) for worker in everyone.values()], "the next ring")

    def _replace(self, starting: threading.Thread, waiting: dict[int, Waiting], anew: bool) -> None:
        """Has new processes come to where the others wait."""
        donor = self._rest[min(self._rest)].actor
        copies = self._pace.deadline(timeouts.get().recovery_answer, copies=1)
        (place,) = self._ask([donor.execute.remote(healing.image, anew)], "a copy of the training's state", copies)
        self._held = self._held_by_all(place, waiting)
        owned = self._owned(place, waiting)
        until = time.monotonic() + timeouts.get().replacement_start
        look = 0.0
        while starting.is_alive() and time.monotonic() < until:
            starting.join(_LOOK_INTERVAL)
            self._check_others()
            if self._asked.has_room is not None and time.monotonic() >= look:
                if not self._asked.has_room(self.lost):
                    raise NotHealedError("no node has room for a replacement worker")
                look = time.monotonic() + _ROOM_INTERVAL
        if self._failed is not None:
            raise self._failed
        if starting.is_alive():
            raise NotHealedError(f"no replacement worker has started within {timeouts.get().replacement_start:g} s")
        self._take_places(place, owned, waiting)
        seconds = self._pace.deadline(timeouts.get().replacement_place, copies=1, first_steps=1)
        waiting |= self._all_wait(self._made, seconds, "make the step")

    def _start(self) -> None:
        try:
            for rank in sorted(self.lost):
                made = self._asked.place(rank)
                with self._lock:
                    if self._given_up:  # what starts late would hold the place of one that all start anew with
                        ray.kill(made.actor)
                        return
                    self._made[rank] = made
            self._asked.started(self._made)
        except BaseException as error:
            self._failed = error

    def _check_others(self) -> None:
        if self.also:
            raise _AnotherLostError("another worker was lost")

    def _owned(self, place: ReplacementState, waiting: Mapping[int, Waiting]) -> dict[int, bytes]:
        """What each lost worker had for itself before the step that the others are in, as it had passed it on."""
        size, owned = len(self._asked.workers), {}
        for rank in self.lost:
            following = (rank + 1) % size
            if following in self.lost:
                raise NotHealedError(
                    f"what worker {rank} had for itself was passed on to worker {following} alone, which was lost, too"
                )
            its = healing.passed_on(waiting[following].held, place.tag)
            if its is None:
                raise NotHealedError(
                    f"worker {rank} was lost between two steps, and what it had for itself after step {place.step} "
                    "with it"
                )
            owned[rank] = its
        return owned

    def _held_by_all(self, place: ReplacementState, waiting: Mapping[int, Waiting]) -> list[bytes] | None:
        """What each worker had for itself behind the last step, by rank; of a lost one maybe that of the step before.

        None where that is not known, or no step was made.
        """
        size, found = len(self._asked.workers), []
        if not place.step:
            self.not_kept = "no step was made"
            return None
        for rank in range(size):
            following = (rank + 1) % size
            if rank not in self.lost:
                passed = waiting[rank].own
            elif following in self.lost:
                return None
            else:
                passed = waiting[following].held
            its = healing.passed_on(passed, place.tag)
            if its is None and rank in self.lost and passed and healing.is_step_before(passed[-1][0], place.tag):
                its = passed[-1][1]
                self.behind.append(rank)
            if its is None:
                return None
            found.append(its)
        return found

    def _take_places(self, place: ReplacementState, owned: Mapping[int, bytes], waiting: Mapping[int, Waiting]) -> None:
        calls = []
        for rank, worker in self._made.items():
            agreed = {**place.agreed, "missing": place.agreed["reports"] - self._asked.reported.get(rank, 0)}
            taken = dataclasses.replace(place, own=owned[rank], agreed=agreed)
            calls.append(worker.actor.execute.remote(healing.take, taken))
        self._ask(calls, "a place in the training", self._pace.deadline(timeouts.get().recovery_answer, copies=1))
        allowed, cores = self._asked.ports, self._asked.cores
        asked = timeouts.under, timeouts.get(), backend.reserve, allowed, cores
        calls = [worker.actor.execute.remote(*asked) for worker in self._made.values()]
        reserved = dict(zip(self._made, self._ask(calls, "an address"), strict=True))
        known = {rank: ports.joined(*its.address) for rank, its in waiting.items()}
        known |= {rank: address for rank, (address, _) in reserved.items()}
        all_, token = [known[rank] for rank in sorted(known)], ring.new_token()
        settle = self._asked.settle
        calls = [settle(self._made[rank], all_, rank, token, pinned) for rank, (_, pinned) in reserved.items()]
        self._ask(calls, "its environment")
        for worker in self._made.values():
            self._asked.begin(worker)

    def _ask(self, refs: list, what: str, seconds: float | None = None) -> list:
        try:
            return answers.collect(refs, timeouts.get().recovery_answer if seconds is None else seconds, what)
        except NoAnswerError as error:
            raise NotHealedError(str(error)) from None

    def _all_wait(self, workers: Mapping[int, Member], seconds: float, what: str) -> dict[int, Waiting]:
        """Where each of some workers waits, once they all do."""
        until, found = time.monotonic() + seconds, {}
        while True:
            self._check_others()
            ranks = [rank for rank in workers if rank not in found]
            told = self._ask([self._asked.standing(workers[rank], _LOOK_INTERVAL) for rank in ranks], what, seconds)
            for rank, (its, error) in zip(ranks, told, strict=True):
                if error is not None and not (isinstance(its, str) and is_consequence(error)):
                    raise NotHealedError(f"worker {rank} failed: {in_a_line(cause_of(error))}")
                if isinstance(its, Waiting):
                    found[rank] = its
                elif isinstance(its, str):
                    raise NotHealedError(f"worker {rank}: {its}")
            if len(found) == len(workers):
                return found
            if time.monotonic() > until:
                late = ", ".join(f"worker {rank}" for rank in ranks)
                raise NotHealedError(f"{late} did not {what} within {seconds:.0f} s")


class Recovery:
    """Recovers a group of workers by one `Healing` after the other, as the run's decisions say.

    Args:
        decide: takes an event, and says what follows, see `Decisions.take`.
        asked: gives what each healing asks of the group.

    Attributes:
        healing: the one that goes on, or None.
    """

    def __init__(self, decide: Callable[[decisions.Event], Action], asked: Callable[[], Asked]):
        self._decide, self._asked = decide, asked
        self._generation = 0  # of the workers' ring
        self.healing: Healing | None = None

    def begin(self, lost: frozenset[int]) -> None:
        """Has processes take these places; none where all live, and have lost their connections."""
        self._generation += 1
        self.healing = Healing(self._asked(), lost, self._generation)

    def connect(self, workers: Iterable[Member]) -> None:
        """Has workers form another ring in the step that all are in: they lost each other, and the processes live."""
        action = self._decide(decisions.Disconnected())
        if action.do is Do.RECOVER:
            self.begin(frozenset())
        else:
            give_up(workers, f"the workers have lost each other, and {action.why or 'all workers restart'}")

    def end(self, also: frozenset[int] = frozenset()) -> tuple[Healing, Action]:
        """Takes in how the healing has ended, and begins another one where that is decided.

        Args:
            also: ranks of workers that were lost meanwhile.

        Returns:
            The healing, and what follows.
        """
        tried, self.healing = self.healing, None
        if tried.healed:
            return tried, self._decide(decisions.Recovered())
        also |= tried.also
        action = self._decide(decisions.NotRecovered(tried.why, tried.another, also, tried.new_lost))
        if action.do is Do.RECOVER:
            ranks = tuple(sorted(tried.lost))
            events.emit(RunEvent(kind=Kind.RECOVERY_INTERRUPTED, ranks=ranks, why=tried.why))
            self.begin(action.ranks)
        return tried, action


def _said(error: BaseException) -> str:
    """An error as a clause: what a worker has refused, as it says it."""
    cause = cause_of(error)
    return str(cause) if isinstance(cause, RaytfError) else in_a_line(cause)


def is_to_be_made_anew(waiting: Mapping[int, Waiting], lost: Collection[int], size: int) -> bool:
    """Whether all that followed the last step is made again, with callbacks on new processes too.

    Args:
        waiting: where each of the others waits.
        lost: the ranks of the lost ones.
        size: how many all are.

    Returns:
        False: only the exchanges of the step that all are in are made again, or those since callbacks were told of one.

    Raises:
        NotHealedError: the others are not in one step, nor behind one step where that can be made again.
    """
    tags, since = {its.tag for its in waiting.values()}, {its.since for its in waiting.values()}
    passed = [waiting[(rank + 1) % size].held for rank in lost if (rank + 1) % size in waiting]
    # what a lost worker has passed on last may be from before it began the epoch in whose first step the others are
    behind = any(tags.isdisjoint(tag for tag, _ in its) for its in passed)
    if len(tags) == 1 and not behind and not any(its.between or its.met for its in waiting.values()):
        return False
    if len(since) == 1 and None not in since:
        return True
    if len(tags) > 1:
        raise NotHealedError("the others are not in one step: some have applied an update that others have not")
    return False


def give_up(workers: Iterable[Member], why: str) -> None:
    """Tells workers that wait for another ring that there is none, and why, as a clause."""
    for worker in workers:
        worker.actor.execute.remote(healing.command, why)


def standing(seconds: float = 0.0) -> tuple[Waiting | str | None, BaseException | None]:
    """On a worker: where it waits, see `Healer.waiting`; what its training has failed of."""
    return healing.here.waiting(seconds), ray_train.training_error()
