"""Recovers a worker group in place: replacement workers join, and the other workers continue. Driver side.

A thread does it; the group waits for it. The workers' part is `raytf.collectives.recovery_client`. If it fails, all
workers restart from the last checkpoint, and an event has the reason. If no node has room for a replacement, the others
first save a checkpoint of their last step. So no step is repeated. See docs/design/recovery.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import ray

from raytf import events, timeouts
from raytf.collectives import recovery_client, ring_token
from raytf.collectives.recovery_client import BlockedWorker, ReplacementState, RingConfig
from raytf.errors import RaytfError, one_line
from raytf.events import Kind, RunEvent, worker_names
from raytf.runtime import answers, ports
from raytf.runtime.answers import NoAnswerError
from raytf.runtime.failures import is_consequence, user_error
from raytf.timeouts import Pace
from raytf.train import backend

# Seconds for which a worker that does not wait yet delays its answer; it answers no other call meanwhile.
_CHECK_INTERVAL = 0.1
# Seconds between two checks for room for a process.
_ROOM_INTERVAL = 0.5

# Addition to the event of a worker's loss, if the worker is replaced.
REPLACING = ". A replacement worker is started; the other workers wait in their step"
# ... and if all workers restart.
RESTARTING = ". All workers restart from the last checkpoint; steps after it are repeated"
# Addition to the event of a failure of the run.
RAISE_LIMIT = ". Raise FailureConfig(max_failures=...) so that it recovers next time"


class RecoveryFailedError(RaytfError, RuntimeError):
    """A lost worker cannot be replaced in place; the message is the reason, as a clause."""


@dataclass(frozen=True)
class Member:
    """A worker of a group.

    Args:
        actor: Actor with an `execute(function, *arguments)`, and `poll_recovery_state(seconds)`, which returns
            (`RecoveryClient.waiting(seconds)` in its process, error of its training or None).
        rank: Its rank.
        bundle: Index of the bundle of its resources.
    """

    actor: Any
    rank: int
    bundle: int


class RecoveryCoordinator:
    """Recovery from one loss, in a thread that starts at once.

    Args:
        group: The `group.EventGroup` of the workers.
        lost: Ranks to replace; empty if all processes live, and have lost their connections.
        generation: Generation of the next ring.

    Attributes:
        lost: Ranks to replace.
        done: Whether it has ended, successful or not.
        recovered: Whether it was successful.
        new: Replacement workers by rank after a success, otherwise {}.
        why: Reason of the failure, as a clause.
        lost_another: Whether another worker was lost meanwhile, so that a retry is possible.
        also_lost: Ranks that were lost during the recovery.
        new_lost: Number of replacement workers that were lost.
        saved_step: Number of steps in the checkpoint that the others saved after the failure, or None.
        older: Ranks whose own part of that checkpoint is of the step before.
        not_saved: Why the others saved none, as a clause, if `why` does not contain it; or "".
    """

    def __init__(self, group, lost: Iterable[int], generation: int):
        self._group, self.lost, self._generation = group, frozenset(lost), generation
        self._survivors = {rank: worker for rank, worker in enumerate(group.members) if rank not in lost}
        self._made: dict[int, Member] = {}
        self.new: dict[int, Member] = {}
        self.recovered = False
        self.why, self.lost_another, self.new_lost = "", False, 0
        self.also_lost: set[int] = set()
        self.saved_step: int | None = None
        self.not_saved = ""
        self.older: list[int] = []
        self._states: list[bytes] | None = None  # own state of each worker by rank, with the lost ones
        self._lock, self._given_up = threading.Lock(), False
        self._pace = Pace()
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._run, daemon=True, name="raytf_recovery")
        self._thread.start()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def _run(self) -> None:
        if not self.lost:
            events.emit(RunEvent(kind=Kind.WORKERS_DISCONNECTED))
        try:
            self._recover()
            self.new, self.recovered = self._made, True
            kind = Kind.WORKER_REPLACED if self.lost else Kind.WORKERS_RECONNECTED
            seconds = time.monotonic() - self._began
            events.emit(RunEvent(kind=kind, ranks=tuple(sorted(self.lost)), seconds=seconds))
        except Exception as error:  # no other code handles it, and the run must continue from its checkpoint
            self.why = error_clause(error)
            self.lost_another = isinstance(error, ray.exceptions.RayActorError)
            if self.lost_another:
                self._find_lost()
            else:
                self._save_checkpoint()
            with self._lock:
                self._given_up = True
                for worker in self._made.values():
                    ray.kill(worker.actor)
            if not isinstance(error, (RaytfError, ray.exceptions.RayError, OSError)):
                raise

    def _find_lost(self) -> None:
        with self._lock:
            made = dict(self._made)
        self.also_lost |= self._dead(self._survivors)
        dead = self._dead(made)
        self.new_lost = len(dead)
        lost = [worker_names(self.also_lost)] if self.also_lost else []
        lost += [f"the process that was to become worker {rank}" for rank in sorted(dead)]
        if lost:
            self.why = f"{' and '.join(lost)} was lost"

    def _dead(self, workers: Mapping[int, Member]) -> set[int]:
        """Returns the ranks whose processes have ended."""
        refs = {worker.actor.poll_recovery_state.remote(0.0): rank for rank, worker in workers.items()}
        dead = set()
        with contextlib.suppress(NoAnswerError):  # the watchdog detects a frozen process
            for _, ref in answers.in_completion_order(list(refs), timeouts.get().sign_of_life, "whether it lives"):
                try:
                    ray.get(ref)
                except ray.exceptions.RayActorError:
                    dead.add(refs[ref])
        return dead

    @property
    def restart_point(self) -> str:
        """Returns the point from which all workers restart after its failure, as a clause."""
        if self.saved_step is None:
            return f"the last checkpoint{self.not_saved and f', as {self.not_saved}'}"
        lacks = f"; metrics of the epoch lack the rows of {worker_names(self.older)} in that step" if self.older else ""
        return f"step {self.saved_step}, of which the others have saved a checkpoint{lacks}"

    def wait(self, seconds: float | None = None) -> None:
        """Blocks until it ends, or for some seconds; each of its parts has a timeout."""
        self._thread.join(seconds)

    def give_up(self) -> None:
        """Reports to waiting workers that there is no next ring."""
        give_up(self._survivors.values(), self.why)

    def _save_checkpoint(self) -> None:
        """Saves a checkpoint of the last common step on one of the others, unless they may have continued."""
        if self._states is None:
            return
        try:
            refs = [
                self._survivors[min(self._survivors)].actor.execute.remote(
                    recovery_client.save_checkpoint, self._states, self.older
                )
            ]
            seconds = self._pace.deadline(timeouts.get().recovery_checkpoint, copies=1)
            (self.saved_step,) = answers.collect_answers(
                refs, seconds, "a checkpoint of the last step that all have made"
            )
        except (RaytfError, ray.exceptions.RayError) as error:  # they restart from the last checkpoint
            self.not_saved = error_clause(error)

    def _recover(self) -> None:
        starting = threading.Thread(target=self._start, daemon=True)
        self._failed: BaseException | None = None
        if self.lost:
            starting.start()
        if self._generation > 1:  # workers may still join the previous ring, with a member that is lost now
            sent = [
                worker.actor.execute.remote(recovery_client.leave, self._generation - 1)
                for worker in self._survivors.values()
            ]
            self._ask(sent, "the end of the ring before")
        sent = [worker.actor.execute.remote(recovery_client.pace) for worker in self._survivors.values()]
        self._pace = Pace.slowest(self._ask(sent, "the size of the training's state"))
        seconds = self._pace.deadline(timeouts.get().recovery_break, first_steps=1)
        waiting = self._all_wait(self._survivors, seconds, "reach the all-reduce that failed")
        repeats_all = replays_from_boundary(waiting, self.lost, len(self._group.members))
        if self.lost:
            self._replace(starting, waiting, repeats_all)
        self._states = None  # after this the workers may continue
        sent = RingConfig(
            [waiting[rank].address for rank in sorted(waiting)],
            ring_token.new_token(),
            self._generation,
            {
                kind: max(state.sequence_numbers[kind] for state in waiting.values())
                for kind in waiting[min(waiting)].sequence_numbers
            },
            repeats_all,
        )
        everyone = self._survivors | self._made
        self._ask(
            [worker.actor.execute.remote(recovery_client.command, sent) for worker in everyone.values()],
            "the next ring",
        )

    def _replace(self, starting: threading.Thread, waiting: dict[int, BlockedWorker], from_scratch: bool) -> None:
        """Brings replacement workers to the step in which the others wait."""
        donor = self._survivors[min(self._survivors)].actor
        copies = self._pace.deadline(timeouts.get().recovery_answer, copies=1)
        (state,) = self._ask(
            [donor.execute.remote(recovery_client.capture_state, from_scratch)],
            "a copy of the training's state",
            copies,
        )
        self._states = self._all_states(state, waiting)
        owned = self._owned(state, waiting)
        deadline = time.monotonic() + timeouts.get().replacement_start
        next_check = 0.0
        while starting.is_alive() and time.monotonic() < deadline:
            starting.join(_CHECK_INTERVAL)
            if time.monotonic() >= next_check:
                if not self._group.has_room(self.lost):
                    raise RecoveryFailedError("no node has room for a replacement worker")
                next_check = time.monotonic() + _ROOM_INTERVAL
        if self._failed is not None:
            raise self._failed
        if starting.is_alive():
            raise RecoveryFailedError(
                f"timeout after {timeouts.get().replacement_start:g} s: no replacement worker has started"
            )
        self._start_replacements(state, owned, waiting)
        seconds = self._pace.deadline(timeouts.get().replacement_location, copies=1, first_steps=1)
        waiting |= self._all_wait(self._made, seconds, "make the step")

    def _start(self) -> None:
        try:
            for rank in sorted(self.lost):
                worker = self._group.replace(rank)
                with self._lock:
                    if self._given_up:  # a late process would occupy the resources of a restarted worker
                        ray.kill(worker.actor)
                        return
                    self._made[rank] = worker
        except BaseException as error:
            self._failed = error

    def _owned(self, state: ReplacementState, waiting: Mapping[int, BlockedWorker]) -> dict[int, bytes]:
        """Returns the own state of each lost worker before the current step, from the next worker."""
        size, owned = len(self._group.members), {}
        for rank in self.lost:
            following = (rank + 1) % size
            if following in self.lost:
                raise RecoveryFailedError(
                    f"only worker {following} had a copy of worker {rank}'s own state, and was lost, too"
                )
            content = recovery_client.message_with_tag(waiting[following].peer_messages, state.tag)
            if content is None:
                raise RecoveryFailedError(
                    f"worker {rank} was lost between two steps, and its own state after step {state.step} with it"
                )
            owned[rank] = content
        return owned

    def _all_states(self, donor_state: ReplacementState, waiting: Mapping[int, BlockedWorker]) -> list[bytes] | None:
        """Returns the own state of each worker after the last step, by rank.

        The state of a lost worker may be of the step before. Returns None if a state is unknown, or no step was made.
        """
        size, states = len(self._group.members), []
        if not donor_state.step:
            self.not_saved = "no step was made"
            return None
        for rank in range(size):
            following = (rank + 1) % size
            if rank not in self.lost:
                passed = waiting[rank].sent_messages
            elif following in self.lost:
                return None
            else:
                passed = waiting[following].peer_messages
            state = recovery_client.message_with_tag(passed, donor_state.tag)
            if (
                state is None
                and rank in self.lost
                and passed
                and recovery_client.is_step_before(passed[-1][0], donor_state.tag)
            ):
                state = passed[-1][1]
                self.older.append(rank)
            if state is None:
                return None
            states.append(state)
        return states

    def _start_replacements(
        self, state: ReplacementState, owned: Mapping[int, bytes], waiting: Mapping[int, BlockedWorker]
    ) -> None:
        calls = []
        for rank, worker in self._made.items():
            shared_state = {
                **state.shared_state,
                "missing": state.shared_state["reports"] - self._group.reported.get(rank, 0),
            }
            replacement_state = dataclasses.replace(state, worker_state=owned[rank], shared_state=shared_state)
            calls.append(worker.actor.execute.remote(recovery_client.set_replacement_state, replacement_state))
        self._ask(
            calls, "the receipt of the training's state", self._pace.deadline(timeouts.get().recovery_answer, copies=1)
        )
        allowed, cores = self._group.config.listening, self._group.cores
        reserve_arguments = timeouts.call_with, timeouts.get(), backend.reserve, allowed, cores
        calls = [worker.actor.execute.remote(*reserve_arguments) for worker in self._made.values()]
        reserved = dict(zip(self._made, self._ask(calls, "an address"), strict=True))
        known = {rank: ports.join_address(*state.address) for rank, state in waiting.items()}
        known |= {rank: address for rank, (address, _) in reserved.items()}
        addresses, token = [known[rank] for rank in sorted(known)], ring_token.new_token()
        send_environment = self._group.send_environment
        calls = [send_environment(self._made[rank], addresses, token, pinned) for rank, (_, pinned) in reserved.items()]
        self._ask(calls, "its environment")
        for worker in self._made.values():
            self._group.start_again(worker)

    def _ask(self, refs: list, action: str, seconds: float | None = None) -> list:
        try:
            return answers.collect_answers(refs, timeouts.get().recovery_answer if seconds is None else seconds, action)
        except NoAnswerError as error:
            raise RecoveryFailedError(str(error)) from None

    def _all_wait(self, workers: Mapping[int, Member], seconds: float, action: str) -> dict[int, BlockedWorker]:
        """Blocks until all of these workers wait; returns the state of each by rank."""
        deadline, states = time.monotonic() + seconds, {}
        while True:
            ranks = [rank for rank in workers if rank not in states]
            replies = self._ask(
                [workers[rank].actor.poll_recovery_state.remote(_CHECK_INTERVAL) for rank in ranks], action, seconds
            )
            for rank, (state, error) in zip(ranks, replies, strict=True):
                if error is not None and not (isinstance(state, str) and is_consequence(error)):
                    raise RecoveryFailedError(f"worker {rank} failed: {one_line(user_error(error))}")
                if isinstance(state, BlockedWorker):
                    states[rank] = state
                elif isinstance(state, str):
                    raise RecoveryFailedError(f"worker {rank}: {state}")
            if len(states) == len(workers):
                return states
            if time.monotonic() > deadline:
                missing = ", ".join(f"worker {rank}" for rank in ranks)
                raise RecoveryFailedError(f"timeout after {seconds:.0f} s: {missing} did not {action}")


def error_clause(error: BaseException) -> str:
    """Returns an error as a clause; for a raytf error, its message."""
    cause = user_error(error)
    return str(cause) if isinstance(cause, RaytfError) else one_line(cause)


def replays_from_boundary(waiting: Mapping[int, BlockedWorker], lost: Collection[int], size: int) -> bool:
    """Returns whether everything after the last step is repeated, on replacement workers with callbacks.

    Args:
        waiting: State of each of the others, by rank.
        lost: Ranks of the lost workers.
        size: Number of all workers.

    Returns:
        False: only the exchanges of the current step are repeated, or those since callbacks received its begin.

    Raises:
        RecoveryFailedError: The others are neither in one step, nor after one step that can be repeated.
    """
    tags, boundaries = {item.tag for item in waiting.values()}, {item.boundary for item in waiting.values()}
    passed = [waiting[(rank + 1) % size].peer_messages for rank in lost if (rank + 1) % size in waiting]
    # the last message of a lost worker may be older than the epoch in whose first step the others are
    outdated = any(tags.isdisjoint(tag for tag, _ in item) for item in passed)
    if len(tags) == 1 and not outdated and not any(item.at_boundary or item.has_exchanged for item in waiting.values()):
        return False
    if len(boundaries) == 1 and None not in boundaries:
        return True
    if len(tags) > 1:
        raise RecoveryFailedError("the others are not in one step: some have applied an update that others have not")
    return False


def give_up(workers: Iterable[Member], why: str) -> None:
    """Reports to waiting workers that there is no next ring, with the reason as a clause."""
    for worker in workers:
        worker.actor.execute.remote(recovery_client.command, why)
