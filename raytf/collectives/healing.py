"""Healing: what a worker of a ring does from the loss of a member until there is another ring, within one step.

A step's update is applied only when all of its sums are there, so that the others stand in one step, before its update.
They wait here, in the sum that failed, while the driver starts a process in the place of the lost one, which gets what
they held before that step. It makes the step from its beginning; then all join another ring, those that had waited make
again the sums of this step that were made, from inputs that are still in memory, and go on. Summed in the same order,
the numbers are the same.

Behind the last step of an epoch all exchanges are kept until the first step of the next one is made: those of its logs,
of the validation, of what callbacks agree on. A process that takes the place of one lost there begins behind that last
step, with what another one held then, and makes the end of the epoch from its beginning: callbacks, too. The others
make their exchanges again with it, and see that what comes of them is the same. So it is between two steps of one
epoch, where workers are known to meet there: for a checkpoint, a look whether one is due, or callbacks that look at
batches. There it begins with telling its callbacks of the batch.

What workers do not have alike, as metrics over rows of their own, each passes on to the next one after every step.

Pure sockets and memory; what a training's state is, says who trains (`raytf.worker.replacement`). Driver:
`raytf.train.healing`.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from raytf import activity, timeouts
from raytf.collectives.ring import Listener, Ring
from raytf.errors import PeerLostError, RaytfError
from raytf.timeouts import Pace

# For which a worker waits that the driver says how it goes on, with what follows from `timeouts.Pace`: it starts a
# process meanwhile, which gets a copy of the state, reads it, and makes a first step, or others keep a checkpoint.
_WAIT_COPIES, _WAIT_STEPS = 4, 2
# More than a socket takes at once would have two neighbours wait for each other.
MOST_BYTES = 64 << 10


@dataclass(frozen=True)
class Rejoin:
    """The next ring.

    Args:
        addresses: (host, port) of all members' listeners, by rank.
        token: see `Listener.join`.
        generation: of the group.
        numbers: of meetings by kind, which `activity` counts on from, the same for all.
        anew: whether all that was exchanged behind the last step, see `Waiting.since`, is exchanged again.
    """

    addresses: Sequence[tuple[str, int]]
    token: bytes = field(repr=False)
    generation: int
    numbers: dict[str, int]
    anew: bool = False


@dataclass(frozen=True)
class Waiting:
    """A worker that waits for the next ring.

    Args:
        tag: see `tag_of`.
        address: (host, port) where it listens.
        held: (tag, bytes) that the one before has passed on, the last ones, in order.
        numbers: of meetings by kind, as `activity` has counted them.
        own: (tag, bytes) that this one has passed on since the step, in order.
        since: the tag behind the step since which all that was exchanged can be exchanged again, or None.
        between: whether it waits behind that step, and not within the next one.
        met: whether workers have met since callbacks were told of the begin of the step that it waits in.
    """

    tag: int
    address: tuple[str, int]
    held: tuple[tuple[int, bytes], ...]
    numbers: dict[str, int]
    own: tuple[tuple[int, bytes], ...] = ()
    since: int | None = None
    between: bool = False
    met: bool = False


@dataclass(frozen=True)
class ReplacementState:
    """What a process needs that takes the place of a lost one.

    Args:
        step: steps of the training that the others have made in all.
        tag: see `tag_of`.
        within: of these steps, those of the execution that goes on.
        at_end: whether it begins behind the last step of an epoch, see `Healer`.
        between: whether it begins behind an execution of steps, of which callbacks are to be told.
        files: of a checkpoint of that step, by name; what another worker held.
        own: what the lost one had passed on after that step.
        agreed: of what workers have agreed on, see `raytf.worker.replacement`.
    """

    step: int
    tag: int
    within: int
    at_end: bool
    files: dict[str, bytes] = field(repr=False)
    own: bytes = field(repr=False)
    agreed: dict[str, Any] = field(repr=False)
    between: bool = False

    @property
    def behind(self) -> bool:
        """Whether it begins behind a step, and not within one."""
        return self.at_end or self.between


def tag_of(step: int) -> int:
    """Names what a worker has for itself when so many steps are made; it may change before the next step, and the tag
    is another one each time: at a checkpoint, when an epoch begins, and behind callbacks that look at batches."""
    return 4 * step


def passed_on(held: Iterable[tuple[int, bytes]], tag: int) -> bytes | None:
    """What was passed on with a tag, or None."""
    return dict(held).get(tag)


def is_step_before(tag: int, other: int) -> bool:
    """Whether a tag is of the step before that of another, behind which nothing has changed since."""
    return other % 4 == 0 and other - 4 <= tag < other


class Detached:
    """The ring of a worker that takes a lost one's place, until it meets the others: as if all were alike.

    Args:
        rank, size, timeout: of the ring that it will be in, see `Ring`.
        rehearses: there will be none, and what is gathered from others is this worker's own.
    """

    alone = True
    generation = 0

    def __init__(self, rank: int, size: int, timeout: float | None, rehearses: bool = False):
        self.rank, self.size, self.timeout, self.sent, self.rehearses = rank, size, timeout, 0, rehearses
        self.held: tuple[tuple[int, bytes], ...] = ()

    def padded(self, items: int) -> int:
        """See `Ring.padded`."""
        return -(-items // self.size) * self.size

    def empty(self, items: int, dtype: np.dtype) -> None:
        """See `Ring.empty`; nobody would read it."""

    def add(self, array: np.ndarray, place: int = 0, fill: Callable[[int, int], None] | None = None) -> np.ndarray:
        """The sum of what is the same everywhere."""
        if fill is not None:
            fill(0, array.size)
        array *= self.size
        return array

    def trades(self, size: int) -> bool:
        """See `Ring.trades`; here `add` does all."""
        return False

    def broadcast(self, array: np.ndarray) -> np.ndarray:
        """The chief's values, which are this worker's own."""
        return array

    def gather(self, array: np.ndarray, bounds: Sequence[int]) -> np.ndarray:
        """Nobody is there who would have other parts."""
        raise NotImplementedError("other workers' parts cannot be read before the replacement has joined")

    def pass_on(self, number: int, content: bytes) -> None:
        """Nobody is there."""

    def close(self) -> None:
        """Nothing is open."""


class _Made(NamedTuple):
    """An exchange that may be made again.

    Attributes:
        exchange: makes it.
        digest: of what came of it; None where that is not looked at.
    """

    exchange: Callable[[], Any]
    digest: int | None

    def again(self) -> bool:
        """Makes it; whether the same comes of it."""
        result = self.exchange()
        return self.digest is None or _digest(result) == self.digest


def _digest(arrays: Sequence[np.ndarray] | np.ndarray | None) -> int:
    """Of the arrays that an exchange has given."""
    found = 0
    for array in arrays if isinstance(arrays, Sequence) else [] if arrays is None else [arrays]:
        found = zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8), found)
    return found


class Healer:
    """Of this process.

    Attributes:
        place: of a lost worker that this one takes, or None.
        within: steps of the execution that goes on which this process has made.
        begun: of it, those that were made before by others.
        step: steps of the training that are made in all.
        tag: of what was passed on last, see `tag_of`.
        at_end: whether the epoch's steps are all made, and its end, with the validation, goes on.
        healed: whether a loss was survived since this was set to False; the same on all workers between two steps.
        rehearses: whether what this process trains is thrown away, and no other takes part in it.
    """

    def __init__(self):
        self.place: ReplacementState | None = None
        self.healed = self.rehearses = False
        self._why: str | None = None  # of a loss that was not survived, which outlives the training
        self._lock = threading.Lock()
        self._changed = threading.Condition()  # where it waits
        self._left = 0  # generation of the last ring that will not be
        self._joining: Listener | None = None
        self._commands: queue.SimpleQueue[Rejoin | str] = queue.SimpleQueue()
        self.disarm()

    def reset(self) -> None:
        """Forgets what it was told: for another training in this process, whose rings are numbered anew."""
        with self._lock:
            self._left = 0
        self.place, self.healed, self._why = None, False, None
        self.disarm()

    def arm(
        self,
        listen: Callable[[], Listener],
        image: Callable[[], ReplacementState],
        lost: Callable[[], None],
        step: int,
        keep: Callable[[Sequence[bytes], Collection[int]], int] | None = None,
        note: Callable[[bool], Callable[[], ReplacementState] | None] | None = None,
        ends: bool = True,
        size: int = 0,
    ) -> None:
        """Says that a loss can be survived from now on.

        Args:
            listen: makes a listener for the next ring.
            image: what a process would need to take a lost one's place; called in another thread while this one waits.
            lost: tells the driver that another worker is lost, without waiting.
            step: steps that are made.
            keep: keep(what each worker has passed on last, by rank; ranks of which that is what they had a step
                before) keeps a checkpoint of the steps that are made, and gives their number; called as `image` is,
                before this worker is told that it cannot go on.
            note: note(whether an epoch ends), called behind its last step and behind each execution of steps. What it
                gives is an `image` of this moment, also later; None where workers are not to meet before the next
                step. Without it a loss is survived behind an epoch only until callbacks are told of its end.
            ends: whether what was noted before callbacks are told of an epoch's end holds from then on, too.
            size: bytes of the training's state.
        """
        self._bytes, self._begun_at, self._first_step = size, time.monotonic(), None
        self._listen, self._image, self._lost, self.step, self._keep = listen, image, lost, step, keep
        self._note, self._ends = note, ends
        self.refused = self._why = None

    def disarm(self, why: str = "the training is not within its steps") -> None:
        """Says that it cannot, and why, as a clause."""
        self._listen = self._image = self._lost = self._keep = self._note = None
        self._bytes, self._begun_at = 0, time.monotonic()
        self._first_step: float | None = None  # its seconds
        self.step = self.within = self.begun = 0
        self.tag = -1
        self._open = self.at_end = self._ends = False
        self._enters = self._executes = self._told = False
        self._made: list[_Made] = []
        self._forget_moment()
        self._completed = 0  # updates, at the end of the step before
        self._waiting: Waiting | None = None
        self._passed: list[tuple[int, bytes]] = []  # since the step, in order
        self.refused: str | None = self._why or why
        with self._changed:
            self._changed.notify_all()

    @contextlib.contextmanager
    def execution(self) -> Iterator[None]:
        """Around an execution of training steps."""
        self._open, self.within = True, 0
        self._executes, self._before_step = True, len(self._made)
        try:
            yield
        finally:
            self.begun = 0
            self._executes = False
            self.close()

    def steps_made(self) -> None:
        """Says that the steps of an execution are made; what follows can be made again where that is noted."""
        self.begun, self._executes = 0, False
        if self._first_step is None:
            self._first_step = time.monotonic() - self._begun_at
        self.close()
        self._note_moment(epoch_ends=False)

    def begin_batch(self) -> None:
        """Says that callbacks are told of the begin of an execution's batch."""
        self._before_batch = len(self._made)

    def end_epoch(self) -> None:
        """Says that an epoch's last step is made, and that its end begins."""
        self._open = self.at_end = True
        self.within, self._told = 0, False
        self._note_moment(epoch_ends=True)

    def _note_moment(self, epoch_ends: bool) -> None:
        if self._note is None or self._since is not None:  # what follows the step was noted behind it
            return
        image = self._note(epoch_ends)
        if image is not None:
            self._open, self._told = True, False
            self._noted_image, self._since = image, self.tag

    def tell_callbacks(self) -> bool:
        """Says that callbacks are told of the epoch's end; whether a loss can be survived from here on, too."""
        self._told = True
        if not self._ends:
            self._forget_moment()
        self.close()
        return self._since is not None

    def close(self) -> None:
        """Says that what follows, as callbacks, cannot be made again by another worker, unless the moment is noted."""
        if self._since is None:
            self._open = self.at_end = False
            self._made.clear()

    def _forget_moment(self) -> None:
        self._since: int | None = None
        self._noted_image: Callable[[], ReplacementState] | None = None
        self._before_step = self._before_batch = 0

    def enter(self, begun: int) -> None:
        """Says that a worker which takes a place meets the others at its next exchange.

        Args:
            begun: see the attribute.
        """
        self._enters, self.begun = True, begun

    @property
    def executes(self) -> bool:
        """Whether this worker is within an execution of training steps."""
        return self._executes

    @property
    def armed(self) -> bool:
        """Whether a loss within a step can be survived."""
        return self._listen is not None

    def stepped(self, holder, content: bytes) -> None:
        """A step has ended, with all that it changes: tells the next worker what only this one has."""
        self._made.clear()
        if self._since is not None:
            self._forget_moment()
        self._completed = holder.completed
        self.step += 1
        self.within += 1
        self._passed.clear()
        self._pass_on(holder, tag_of(self.step), content)

    def averaged(self, holder, content: bytes) -> None:
        """A checkpoint behind the step has given workers their mean of what only each has: tells the next one."""
        self._pass_on(holder, tag_of(self.step) + 1, content)

    def began(self, holder, content: bytes) -> None:
        """An epoch has begun: tells the next worker what only this one has, as metrics were reset."""
        self._pass_on(holder, tag_of(self.step) + 2, content)

    def resumes(self, holder, content: bytes) -> None:
        """An execution begins behind callbacks that looked at batches: tells the next worker what only this one has, if
        they have changed it; one that is lost before begins behind the last step, and tells its callbacks again."""
        if self._passed and self._passed[-1][1] == content:
            return
        self._pass_on(holder, tag_of(self.step) + 3, content)

    def _pass_on(self, holder, tag: int, content: bytes) -> None:
        self.tag = tag
        self._passed.append((tag, content))
        try:
            holder.ring.pass_on(tag, content)
        except PeerLostError:  # the next exchange finds it out, and can be made again
            return

    def make(self, holder, exchange: Callable[[], Any]) -> Any:
        """Makes an exchange with the other workers, in another ring if this one breaks.

        Args:
            holder: has the ring as `ring`, takes another by `replace(ring)`, and counts updates as `completed`.
            exchange: makes it, from inputs that it leaves as they are.
        """
        if self._enters:
            self._enters = False
            self._meet(holder, None)
        while True:
            try:
                result = exchange()
                break
            except PeerLostError as error:
                self._mend(holder, error)
        if self._open and self.armed:
            self._made.append(_Made(exchange, None if self._executes else _digest(result)))
        return result

    def _mend(self, holder, error: PeerLostError) -> None:
        if not self._open or not self.armed:
            if self.armed:
                self._refuse("it met the others between two steps, as in a checkpoint or in a callback")
            raise error
        if holder.completed != self._completed:
            self._refuse("a part of the step's updates was applied")
            raise error
        while True:
            self._meet(holder, error)
            try:
                if not all(made.again() for made in self._made):
                    self._refuse("what followed the last step, made again, came to something else")
                    warnings.warn(
                        "A replacement worker has repeated what followed the last step, and has got another result, "
                        "as with a callback that draws or measures: all workers restart from the last checkpoint",
                        stacklevel=2,
                    )
                    raise error
                return
            except PeerLostError as another:
                if self.refused is not None:
                    raise
                error = another

    def _refuse(self, why: str) -> None:
        self.refused = self._why = why

    def _meet(self, holder, error: PeerLostError | None) -> None:
        """Waits for the driver's word, and joins the ring that it tells of, or the next one where that will not be."""
        ring = None
        while ring is None:
            ring = self._join_next(holder.ring, error)
        holder.replace(ring)
        self._completed, self.healed = holder.completed, True
        if self.place is not None:
            self.tag, self._passed = self.place.tag, [(self.place.tag, self.place.own)]
            self.place = None
        passed = self._passed if sum(len(its) for _, its in self._passed) <= MOST_BYTES else self._passed[-1:]
        with contextlib.suppress(PeerLostError):  # which the exchange that follows finds out
            for number, content in passed:  # the one behind may be new, and this one the next that is lost
                ring.pass_on(number, content)

    def _join_next(self, old, error: PeerLostError | None) -> Ring | None:
        if error is not None:
            self._lost()
        listener = self._listen()
        while not self._commands.empty():
            self._commands.get()
        here = activity.here
        numbers, where = here.told()["numbers"], (listener.host, listener.port)
        with self._changed:
            between = self._since is not None and not self._executes
            met = self._executes and self._before_step > self._before_batch
            own = tuple(self._passed)
            self._waiting = Waiting(self.tag, where, old.held, numbers, own, self._since, between, met)
            self._changed.notify_all()
        try:
            with here.meeting(activity.HEALING):
                try:
                    seconds = self.pace().deadline(timeouts.get().recovery_plan, _WAIT_COPIES, _WAIT_STEPS)
                    told = self._commands.get(timeout=seconds)
                except queue.Empty:
                    told = f"no word of the driver within {seconds:.0f} s"
                self._waiting = None
                if not isinstance(told, Rejoin):
                    raise error or PeerLostError(old.rank, f"took no place of a lost worker: {told}", None)
                ring = self._join(listener, old, told)
        finally:
            listener.close()
            self._waiting = None
        if ring is not None:
            ring.held = old.held
            here.count(told.numbers)
            if self._since is not None and not told.anew:  # one that is new knows of the step alone
                del self._made[: self._before_step]
                self._forget_moment()
        return ring

    def _join(self, listener: Listener, old, told: Rejoin) -> Ring | None:
        """The ring that the driver has told of; None where it said meanwhile that another will be."""
        with self._lock:
            if told.generation <= self._left:
                return None
            self._joining = listener
        try:
            return listener.join(
                old.rank,
                list(told.addresses),
                told.token,
                timeouts.get().ring_join,
                old.timeout,
                generation=told.generation,
            )
        except PeerLostError:
            if told.generation <= self._left:
                return None
            raise
        finally:
            with self._lock:
                self._joining = None

    def leave(self, generation: int) -> None:
        """Says that the ring of this generation will not be; who is about to join it, waits for another one."""
        with self._lock:
            self._left = max(self._left, generation)
            if self._joining is not None:
                self._joining.stop()

    def waiting(self, seconds: float = 0.0) -> Waiting | str | None:
        """Where this worker waits, within so many seconds; None where it does not; why it never will, as a clause."""
        with self._changed:
            self._changed.wait_for(lambda: self._where() is not None, seconds)
            return self._where()

    def _where(self) -> Waiting | str | None:
        if self._waiting is not None:
            return self._waiting
        return None if self.armed or self.place is not None else self.refused

    def image(self, anew: bool = False) -> ReplacementState:
        """See `arm`; `anew`, of the moment that is noted, see `Waiting.since`."""
        return self._noted_image() if anew else self._image()

    def keep(self, owned: Sequence[bytes], behind: Collection[int]) -> int:
        """See `arm`.

        Raises:
            RaytfError: this worker does not wait, or cannot keep one.
        """
        if self._waiting is None or self._keep is None:
            raise RaytfError("a worker that was to keep a checkpoint cannot, or does not wait any more")
        if not self._executes and (self._told or (self._since is not None and not self.at_end)):
            raise RaytfError("callbacks may have been called after the step, and may have changed their state")
        return self._keep(owned, behind)

    def pace(self) -> Pace:
        """See `Pace`."""
        seconds = self._first_step
        return Pace(self._bytes, time.monotonic() - self._begun_at if seconds is None else seconds)

    def command(self, told: Rejoin | str) -> None:
        """Tells a worker that waits of its next ring, or why there is none."""
        self._commands.put(told)


# Of this process.
here = Healer()


# ------------------------------------------------------------------------------- what the driver has workers execute


def image(anew: bool = False) -> ReplacementState:
    """`Healer.image`, as a function that another process sends here."""
    return here.image(anew)


def keep(owned: Sequence[bytes], behind: Collection[int]) -> int:
    """`Healer.keep`, likewise."""
    return here.keep(owned, behind)


def command(told: Rejoin | str) -> None:
    """`Healer.command`, likewise."""
    here.command(told)


def pace() -> Pace:
    """`Healer.pace`, likewise."""
    return here.pace()


def leave(generation: int) -> None:
    """`Healer.leave`, likewise."""
    here.leave(generation)


def take(place: ReplacementState) -> None:
    """Says that the training which is to begin in this process takes a lost worker's place."""
    here.disarm("the replacement has not joined yet")
    here.place = place
