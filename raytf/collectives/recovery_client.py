"""Recovery in the workers: from the loss of a ring's member until the next ring, within one step.

A step's update is applied only when all of its sums are complete. So all remaining workers wait before its update. The
driver starts a replacement worker with their state before that step. All join another ring, and repeat the sums of this
step from inputs in memory. They repeat exchanges between steps, and at the end of an epoch, in the same way. See
docs/design/recovery.md. Driver: `raytf.train.recovery_coordinator`; state of a training: `raytf.worker.replacement`.

Over 500 lines: one protocol, whose phases share the state of a loss.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from raytf import activity, logs, timeouts
from raytf.collectives.ring import Ring
from raytf.collectives.ring_listener import Listener
from raytf.errors import PeerLostError, RaytfError
from raytf.timeouts import Pace

logger = logs.get_logger(__name__)

# How long a worker waits for the driver's command, in terms of `timeouts.Pace`: a replacement starts, copies the state
# and makes its first step, or others save a checkpoint.
_WAIT_COPIES, _WAIT_STEPS = 4, 2
# Larger messages fill a socket, and two neighbours would wait for each other.
MOST_BYTES = 64 << 10


@dataclass(frozen=True)
class RingConfig:
    """The next ring.

    Args:
        addresses: (host, port) of all members' listeners, by rank.
        token: Token of the ring, `TOKEN_BYTES` bytes.
        generation: Generation of the ring.
        sequence_numbers: Numbers of collectives by kind from which `activity` continues, the same for all.
        from_scratch: Whether all exchanges after the last step are repeated, see `BlockedWorker.boundary`.
    """

    addresses: Sequence[tuple[str, int]]
    token: bytes = field(repr=False)
    generation: int
    sequence_numbers: dict[str, int]
    from_scratch: bool = False


@dataclass(frozen=True)
class BlockedWorker:
    """A worker that waits for the next ring.

    Args:
        tag: Tag of its last message to the next worker, see `state_version`.
        address: (host, port) on which it listens.
        peer_messages: Last (tag, bytes) from the previous worker, in order.
        sequence_numbers: Numbers of collectives by kind, as `activity` counted them.
        sent_messages: (tag, bytes) that this worker has sent to the next one since the step, in order.
        boundary: Tag after which all exchanges can be repeated, or None.
        at_boundary: Whether it waits after that step, and not within the next one.
        has_exchanged: Whether workers have exchanged data since callbacks got the begin of the step in which it waits.
    """

    tag: int
    address: tuple[str, int]
    peer_messages: tuple[tuple[int, bytes], ...]
    sequence_numbers: dict[str, int]
    sent_messages: tuple[tuple[int, bytes], ...] = ()
    boundary: int | None = None
    at_boundary: bool = False
    has_exchanged: bool = False


@dataclass(frozen=True)
class ReplacementState:
    """The state that a replacement worker needs.

    Args:
        step: Number of steps of the training that the others have completed.
        tag: Tag of the lost worker's own state, see `state_version`.
        steps_in_execution: Number of these steps that belong to the current execution.
        at_end: Whether it begins after the last step of an epoch, see `RecoveryClient`.
        after_execution: Whether it begins after an execution of steps, with the callbacks for it.
        files: Files of a checkpoint of that step by name, from another worker.
        worker_state: Bytes that the lost worker had sent to the next one after that step.
        shared_state: State that all workers have agreed on, see `raytf.worker.replacement`.
    """

    step: int
    tag: int
    steps_in_execution: int
    at_end: bool
    files: dict[str, bytes] = field(repr=False)
    worker_state: bytes = field(repr=False)
    shared_state: dict[str, Any] = field(repr=False)
    after_execution: bool = False

    @property
    def after_step(self) -> bool:
        """Returns whether it begins after a step, and not within one."""
        return self.at_end or self.after_execution


def state_version(step: int) -> int:
    """Returns the tag of a worker's own state after `step` steps.

    The state may change before the next step: at a checkpoint, and when an epoch begins. It may also change after
    callbacks that read batches. Each kind of change has a tag of its own.
    """
    return 4 * step


def message_with_tag(messages: Iterable[tuple[int, bytes]], tag: int) -> bytes | None:
    """Returns the bytes that were sent with a tag, or None."""
    return dict(messages).get(tag)


def is_step_before(tag: int, other: int) -> bool:
    """Returns whether `tag` is of the step before the step of `other`, and nothing has changed after that step."""
    return other % 4 == 0 and other - 4 <= tag < other


class PlaceholderRing:
    """Replaces the ring of a replacement worker until it joins the others: computes as if all workers were equal.

    Args:
        rank, size, timeout: As for the later `Ring`.
        warms_up: Whether no ring will follow, so that gathers repeat this worker's own data.
    """

    is_placeholder = True
    generation = 0

    def __init__(self, rank: int, size: int, timeout: float | None, warms_up: bool = False):
        self.rank, self.size, self.timeout, self.sent, self.warms_up = rank, size, timeout, 0, warms_up
        self.peer_messages: tuple[tuple[int, bytes], ...] = ()

    def padded(self, items: int) -> int:
        """Returns the same as `Ring.padded`."""
        return -(-items // self.size) * self.size

    def empty(self, items: int, dtype: np.dtype) -> None:
        """Returns None: no other process would read it."""

    def all_reduce(
        self, array: np.ndarray, sum_number: int = 0, fill: Callable[[int, int], None] | None = None
    ) -> np.ndarray:
        """Returns the sum of equal arrays of all workers."""
        if fill is not None:
            fill(0, array.size)
        array *= self.size
        return array

    def uses_small_gather(self, size: int) -> bool:
        """Returns False: `all_reduce` does all sums."""
        return False

    def broadcast(self, array: np.ndarray) -> np.ndarray:
        """Returns the chief's values, which are equal to this worker's."""
        return array

    def gather(self, array: np.ndarray, bounds: Sequence[int]) -> np.ndarray:
        """Raises: there are no other workers with other parts."""
        raise NotImplementedError("other workers' parts cannot be read before the replacement has joined")

    def send_to_successor(self, number: int, content: bytes) -> None:
        """Does nothing: there is no next worker."""

    def close(self) -> None:
        """Does nothing: no connection is open."""


class _RepeatableExchange(NamedTuple):
    """An exchange that can be repeated.

    Attributes:
        exchange: Function that makes it.
        digest: Digest of its result; None if the result is not compared.
    """

    exchange: Callable[[], Any]
    digest: int | None

    def repeat(self) -> bool:
        """Repeats the exchange; returns whether the result is the same."""
        result = self.exchange()
        return self.digest is None or _digest(result) == self.digest


def _digest(arrays: Sequence[np.ndarray] | np.ndarray | None) -> int:
    """Returns the digest of an exchange's result."""
    digest = 0
    for array in arrays if isinstance(arrays, Sequence) else [] if arrays is None else [arrays]:
        digest = zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8), digest)
    return digest


class RecoveryClient:
    """The recovery of this process.

    Attributes:
        replacement_state: State that this worker starts from as a replacement worker, or None.
        steps_in_execution: Number of steps of the current execution that this process has made.
        begun: Number of steps of the execution that others made before this replacement worker started.
        step: Number of steps of the training in all.
        tag: Tag of the last message to the next worker, see `state_version`.
        at_end: Whether all steps of the epoch are made, and its end, with the validation, is running.
        recovered: Whether a loss was recovered since this was set to False; the same on all workers between two steps.
        warms_up: Whether this process trains alone and discards the result.
    """

    def __init__(self):
        self.replacement_state: ReplacementState | None = None
        self.recovered = self.warms_up = False
        self._why: str | None = None  # reason of a failed recovery, which outlives the training
        self._lock = threading.Lock()
        self._changed = threading.Condition()  # notifies of changes of the waiting state
        self._cancelled_generation = 0  # generation of the last cancelled ring
        self._joining: Listener | None = None
        self._commands: queue.SimpleQueue[RingConfig | str] = queue.SimpleQueue()
        self.disarm()

    def reset(self) -> None:
        """Clears the state for another training in this process, whose rings have new numbers."""
        with self._lock:
            self._cancelled_generation = 0
        self.replacement_state, self.recovered, self._why = None, False, None
        self.disarm()

    def arm(
        self,
        listen: Callable[[], Listener],
        capture_state: Callable[[], ReplacementState],
        lost: Callable[[], None],
        step: int,
        save_checkpoint: Callable[[Sequence[bytes], Collection[int]], int] | None = None,
        capture_at_boundary: Callable[[bool], Callable[[], ReplacementState] | None] | None = None,
        keeps_boundary: bool = True,
        size: int = 0,
    ) -> None:
        """Enables recovery from now on.

        Args:
            listen: Returns a listener for the next ring.
            capture_state: Returns the state for a replacement worker; called in another thread while this worker waits.
            lost: Reports the loss of another worker to the driver, without waiting.
            step: Number of steps that are made.
            save_checkpoint: save_checkpoint(messages, older) saves a checkpoint of the steps that are made. The
                messages are the last ones of the workers, by rank. The ranks in `older` have a message of the step
                before. It returns the number of steps. It is called like `capture_state`, before this worker receives
                that it cannot continue.
            capture_at_boundary: capture_at_boundary(epoch_ends) is called after the last step of an epoch and after
                each execution. Returns a `capture_state` of this boundary, or None if workers exchange nothing before
                the next step. Without it, recovery after an epoch ends with the call of its callbacks.
            keeps_boundary: Whether a boundary before the callbacks of an epoch's end stays valid afterwards.
            size: Number of bytes of the training's state.
        """
        self._bytes, self._begun_at, self._first_step = size, time.monotonic(), None
        self._listen, self._capture_state, self._lost = listen, capture_state, lost
        self.step, self._save_checkpoint = step, save_checkpoint
        self._capture_at_boundary, self._keeps_boundary = capture_at_boundary, keeps_boundary
        self.refused = self._why = None

    def disarm(self, why: str = "the training is not within its steps") -> None:
        """Disables recovery; `why` is the reason, as a clause."""
        self._listen = self._capture_state = self._lost = self._save_checkpoint = self._capture_at_boundary = None
        self._bytes, self._begun_at = 0, time.monotonic()
        self._first_step: float | None = None  # its duration in seconds
        self.step = self.steps_in_execution = self.begun = 0
        self.tag = -1
        self._open = self.at_end = self._keeps_boundary = False
        self._enters = self._executes = self._callbacks_called = False
        self._repeatable: list[_RepeatableExchange] = []
        self._clear_boundary()
        self._completed = 0  # number of updates at the end of the step before
        self._waiting: BlockedWorker | None = None
        self._sent_messages: list[tuple[int, bytes]] = []  # messages since the step, in order
        self.refused: str | None = self._why or why
        with self._changed:
            self._changed.notify_all()

    @contextlib.contextmanager
    def execution(self) -> Iterator[None]:
        """Marks an execution of training steps."""
        self._open, self.steps_in_execution = True, 0
        self._executes, self._before_step = True, len(self._repeatable)
        try:
            yield
        finally:
            self.begun = 0
            self._executes = False
            self.close()

    def steps_made(self) -> None:
        """Marks the end of an execution's steps; exchanges after it can be repeated if a boundary is marked."""
        self.begun, self._executes = 0, False
        if self._first_step is None:
            self._first_step = time.monotonic() - self._begun_at
        self.close()
        self._mark_boundary(epoch_ends=False)

    def begin_batch(self) -> None:
        """Marks that callbacks get the begin of an execution's batch."""
        self._before_batch = len(self._repeatable)

    def end_epoch(self) -> None:
        """Marks that the last step of an epoch is made, and that the end of the epoch begins."""
        self._open = self.at_end = True
        self.steps_in_execution, self._callbacks_called = 0, False
        self._mark_boundary(epoch_ends=True)

    def _mark_boundary(self, epoch_ends: bool) -> None:
        if self._capture_at_boundary is None or self._boundary is not None:  # the one after the step is marked already
            return
        capture_state = self._capture_at_boundary(epoch_ends)
        if capture_state is not None:
            self._open, self._callbacks_called = True, False
            self._boundary_state, self._boundary = capture_state, self.tag

    def mark_epoch_end(self) -> bool:
        """Marks that callbacks get the epoch's end; returns whether recovery is still possible."""
        self._callbacks_called = True
        if not self._keeps_boundary:
            self._clear_boundary()
        self.close()
        return self._boundary is not None

    def close(self) -> None:
        """Marks that the following exchanges, as of callbacks, cannot be repeated, unless a boundary is marked."""
        if self._boundary is None:
            self._open = self.at_end = False
            self._repeatable.clear()

    def _clear_boundary(self) -> None:
        self._boundary: int | None = None
        self._boundary_state: Callable[[], ReplacementState] | None = None
        self._before_step = self._before_batch = 0

    def join_at_next_exchange(self, begun: int) -> None:
        """Marks that this replacement worker joins the others at its next exchange.

        Args:
            begun: Number of steps of the execution that others have made, see the attribute.
        """
        self._enters, self.begun = True, begun

    @property
    def executes(self) -> bool:
        """Returns whether this worker is within an execution of training steps."""
        return self._executes

    @property
    def armed(self) -> bool:
        """Returns whether recovery from a loss within a step is enabled."""
        return self._listen is not None

    def send_state_after_step(self, holder, content: bytes) -> None:
        """Marks the end of a step, and sends this worker's own state to the next one."""
        self._repeatable.clear()
        if self._boundary is not None:
            self._clear_boundary()
        self._completed = holder.completed
        self.step += 1
        self.steps_in_execution += 1
        self._sent_messages.clear()
        self._send_to_successor(holder, state_version(self.step), content)

    def send_averaged_state(self, holder, content: bytes) -> None:
        """Sends this worker's own state to the next one after a checkpoint that averaged it over the workers."""
        self._send_to_successor(holder, state_version(self.step) + 1, content)

    def send_state_at_epoch_begin(self, holder, content: bytes) -> None:
        """Sends this worker's own state to the next one after the begin of an epoch, which resets metrics."""
        self._send_to_successor(holder, state_version(self.step) + 2, content)

    def send_state_before_execution(self, holder, content: bytes) -> None:
        """Sends this worker's own state to the next one before an execution, if callbacks that read batches changed it.

        If this worker is lost before that, its replacement begins after the last step, and calls its callbacks again.
        """
        if self._sent_messages and self._sent_messages[-1][1] == content:
            return
        self._send_to_successor(holder, state_version(self.step) + 3, content)

    def _send_to_successor(self, holder, tag: int, content: bytes) -> None:
        self.tag = tag
        self._sent_messages.append((tag, content))
        try:
            holder.ring.send_to_successor(tag, content)
        except PeerLostError:  # the next exchange detects the loss, and can be repeated
            return

    def run_exchange(self, holder, exchange: Callable[[], Any]) -> Any:
        """Makes an exchange with the other workers, in another ring if this one breaks.

        Args:
            holder: An object with the ring as `ring`, `replace(ring)` for another ring, and `completed` updates.
            exchange: Makes the exchange, and does not change its inputs.
        """
        if self._enters:
            self._enters = False
            self._rejoin(holder, None)
        while True:
            try:
                result = exchange()
                break
            except PeerLostError as error:
                self._recover_exchange(holder, error)
        if self._open and self.armed:
            self._repeatable.append(_RepeatableExchange(exchange, None if self._executes else _digest(result)))
        return result

    def _recover_exchange(self, holder, error: PeerLostError) -> None:
        if not self._open or not self.armed:
            if self.armed:
                self._refuse("the loss came in an exchange between two steps, as in a checkpoint or in a callback")
            raise error
        if holder.completed != self._completed:
            self._refuse("a part of the step's updates was applied")
            raise error
        while True:
            self._rejoin(holder, error)
            try:
                if not all(made.repeat() for made in self._repeatable):
                    self._refuse("repeating the exchanges after the last step gave another result")
                    logger.warning(
                        "A callback is not deterministic: a replacement worker has repeated the exchanges after the "
                        "last step with another result. All workers restart from the last checkpoint. Let the chief "
                        "alone decide (raytf.on_chief), or draw from a seed"
                    )
                    raise error
                return
            except PeerLostError as new_error:
                if self.refused is not None:
                    raise
                error = new_error

    def _refuse(self, why: str) -> None:
        self.refused = self._why = why

    def _rejoin(self, holder, error: PeerLostError | None) -> None:
        """Waits for the driver's command, and joins the new ring; repeats this if that ring is cancelled."""
        ring = None
        while ring is None:
            ring = self._join_next(holder.ring, error)
        holder.replace(ring)
        self._completed, self.recovered = holder.completed, True
        if self.replacement_state is not None:
            self.tag, self._sent_messages = (
                self.replacement_state.tag,
                [(self.replacement_state.tag, self.replacement_state.worker_state)],
            )
            self.replacement_state = None
        passed = (
            self._sent_messages
            if sum(len(message) for _, message in self._sent_messages) <= MOST_BYTES
            else self._sent_messages[-1:]
        )
        with contextlib.suppress(PeerLostError):  # the next exchange detects the loss
            for number, content in passed:  # the next member may be new, and this one the next that is lost
                ring.send_to_successor(number, content)

    def _join_next(self, old, error: PeerLostError | None) -> Ring | None:
        if error is not None:
            self._lost()
        listener = self._listen()
        while not self._commands.empty():
            self._commands.get()
        activity_log = activity.tracker
        sequence_numbers, address = activity_log.snapshot()["numbers"], (listener.host, listener.port)
        with self._changed:
            at_boundary = self._boundary is not None and not self._executes
            has_exchanged = self._executes and self._before_step > self._before_batch
            sent_messages = tuple(self._sent_messages)
            self._waiting = BlockedWorker(
                self.tag,
                address,
                old.peer_messages,
                sequence_numbers,
                sent_messages,
                self._boundary,
                at_boundary,
                has_exchanged,
            )
            self._changed.notify_all()
        try:
            with activity_log.collective(activity.RECOVERY):
                try:
                    seconds = self.pace().deadline(timeouts.get().recovery_plan, _WAIT_COPIES, _WAIT_STEPS)
                    command = self._commands.get(timeout=seconds)
                except queue.Empty:
                    command = f"timeout after {seconds:.0f} s: the driver sent nothing"
                self._waiting = None
                if not isinstance(command, RingConfig):
                    raise error or PeerLostError(old.rank, f"did not join the next ring: {command}", None)
                ring = self._join(listener, old, command)
        finally:
            listener.close()
            self._waiting = None
        if ring is not None:
            ring.peer_messages = old.peer_messages
            activity_log.count(command.sequence_numbers)
            if self._boundary is not None and not command.from_scratch:  # a new worker repeats only the step
                del self._repeatable[: self._before_step]
                self._clear_boundary()
        return ring

    def _join(self, listener: Listener, old, command: RingConfig) -> Ring | None:
        """Returns the ring of the driver's command; None if the driver has cancelled it meanwhile."""
        with self._lock:
            if command.generation <= self._cancelled_generation:
                return None
            self._joining = listener
        try:
            return listener.join(
                old.rank,
                list(command.addresses),
                command.token,
                timeouts.get().ring_join,
                old.timeout,
                generation=command.generation,
            )
        except PeerLostError:
            if command.generation <= self._cancelled_generation:
                return None
            raise
        finally:
            with self._lock:
                self._joining = None

    def leave(self, generation: int) -> None:
        """Cancels the ring of a generation: a worker that is joining it waits for another one."""
        with self._lock:
            self._cancelled_generation = max(self._cancelled_generation, generation)
            if self._joining is not None:
                self._joining.stop()

    def waiting(self, seconds: float = 0.0) -> BlockedWorker | str | None:
        """Returns the state of this worker if it waits within `seconds`, a reason if it never will, otherwise None."""
        with self._changed:
            self._changed.wait_for(lambda: self._recovery_state() is not None, seconds)
            return self._recovery_state()

    def _recovery_state(self) -> BlockedWorker | str | None:
        if self._waiting is not None:
            return self._waiting
        return None if self.armed or self.replacement_state is not None else self.refused

    def capture_state(self, from_scratch: bool = False) -> ReplacementState:
        """Returns the result of `capture_state` of `arm`; with `from_scratch`, that of the boundary."""
        return self._boundary_state() if from_scratch else self._capture_state()

    def save_checkpoint(self, owned: Sequence[bytes], older: Collection[int]) -> int:
        """Saves a checkpoint, as `save_checkpoint` of `arm`.

        Raises:
            RaytfError: This worker does not wait, or cannot save one.
        """
        if self._waiting is None or self._save_checkpoint is None:
            raise RaytfError("this worker cannot save a checkpoint, or waits no more")
        if not self._executes and (self._callbacks_called or (self._boundary is not None and not self.at_end)):
            raise RaytfError("callbacks may have been called after the step, and may have changed their state")
        return self._save_checkpoint(owned, older)

    def pace(self) -> Pace:
        """Returns the pace of this training, see `Pace`."""
        seconds = self._first_step
        return Pace(self._bytes, time.monotonic() - self._begun_at if seconds is None else seconds)

    def command(self, order: RingConfig | str) -> None:
        """Sends a waiting worker its next ring, or the reason why there is none."""
        self._commands.put(order)


# The instance of this process.
client = RecoveryClient()


# ----------------------------------------------------------------------------- remote calls from the driver


def capture_state(from_scratch: bool = False) -> ReplacementState:
    """Calls `RecoveryClient.capture_state` of this process."""
    return client.capture_state(from_scratch)


def save_checkpoint(owned: Sequence[bytes], older: Collection[int]) -> int:
    """Calls `RecoveryClient.save_checkpoint` of this process."""
    return client.save_checkpoint(owned, older)


def command(order: RingConfig | str) -> None:
    """Calls `RecoveryClient.command` of this process."""
    client.command(order)


def pace() -> Pace:
    """Calls `RecoveryClient.pace` of this process."""
    return client.pace()


def leave(generation: int) -> None:
    """Calls `RecoveryClient.leave` of this process."""
    client.leave(generation)


def set_replacement_state(state: ReplacementState) -> None:
    """Makes the next training of this process start as a replacement worker, from `state`."""
    client.disarm("the replacement has not joined yet")
    client.replacement_state = state
