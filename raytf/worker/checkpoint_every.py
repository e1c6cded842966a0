"""How often a training keeps a checkpoint within its epochs: what `checkpoint_every` says, when one is due. Pure."""

from __future__ import annotations

import dataclasses
import math
import re

from raytf.errors import ConfigError

_TEXT = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]+)")
_UNITS = {"s": 1.0, "sec": 1.0, "min": 60.0, "h": 3600.0}
_STEPS = ("step", "steps")
# With "auto": what checkpoints, and looking for when they are due, may take of the time; how near they are at most.
_SHARE, _LEAST_INTERVAL = 0.01, 30.0
# What the first is taken to cost, on a busy machine: the functions for it are made.
_FIRST_COST = 1.0
# From one look of the chief to the next: steps may become slower, or faster. With "auto" a moment matters less, and
# looks may take a part of what checkpoints may.
_LONGEST_WAIT = 5.0
_SHORTEST_AUTO_WAIT, _LONGEST_AUTO_WAIT, _PART_OF_LOOKS = 1.0, 15.0, 0.2
_FIRST_LOOK = 4


@dataclasses.dataclass(frozen=True)
class Every:
    """What `checkpoint_every` says; each epoch ends with a checkpoint in any case.

    Args:
        steps: so many steps of the training, or None.
        seconds: so many seconds after the last one, or None.
        auto: as often as it costs little.
    """

    steps: int | None = None
    seconds: float | None = None
    auto: bool = False

    @property
    def within_epochs(self) -> bool:
        return self != Every()


def parse(given: object) -> Every:
    """What `checkpoint_every` says: "auto", "epoch", "100 steps", "30 s", "10 min", "2 h".

    Raises:
        ConfigError: it says something else.
    """
    if given == "epoch":
        return Every()
    if given == "auto":
        return Every(auto=True)
    found = _TEXT.fullmatch(given.strip()) if isinstance(given, str) else None
    number, unit = (float(found[1]), found[2]) if found else (0.0, "")
    if number > 0 and math.isfinite(number):
        if unit in _STEPS and number.is_integer():
            return Every(steps=int(number))
        if unit in _UNITS:
            return Every(seconds=number * _UNITS[unit])
    raise ConfigError(
        'checkpoint_every must be "auto", "epoch", or a number above 0 of steps, s, min or h',
        repr(given),
        'Use "100 steps" or "10 min", for example',
    )


def steps(given: object) -> int | None:
    """What `memory_every` says: "10 steps", or None.

    Raises:
        ConfigError: it says something else.
    """
    if given is None:
        return None
    try:
        found = parse(given).steps
    except ConfigError:
        found = None
    if found is None:
        raise ConfigError(
            "memory_every must be a number of steps above 0, or None", repr(given), 'Use "10 steps", for example'
        )
    return found


def crosses(every: int, before: int, after: int) -> bool:
    """Whether a multiple of `every` steps lies in (before, after]."""
    return before // every < after // every


class Clock:
    """On the chief: when a checkpoint is due by time, and after how many steps to look again.

    Looking takes an exchange between the workers, so that there are few looks: each comes when half of the time to the
    next checkpoint is over.

    Args:
        every: with seconds, or auto.
        now: seconds of a clock that never goes back.
        step: steps made so far.
    """

    def __init__(self, every: Every, now: float, step: int):
        self._every = every
        self._began = self._last = self._looked = now
        self._first = self._looked_at = step
        self._spent, self._cost, self._look = 0.0, _FIRST_COST, 0.0

    def look(self, now: float, step: int) -> tuple[bool, int]:
        """(whether one is due, after how many steps from now, at least 1, the next look comes)."""
        each = (now - self._looked) / max(1, step - self._looked_at)
        self._looked, self._looked_at = now, step
        left = self._due() - now
        if left <= 0:
            return True, 1
        # the first steps say little of those that come
        most = max(_FIRST_LOOK, step - self._first)
        return False, int(min(max(1.0, self._wait(left) / max(each, 1e-6)), most))

    def _wait(self, left: float) -> float:
        """Seconds to the next look, where so many are left to the next checkpoint."""
        if not self._every.auto:
            return min(left / 2, _LONGEST_WAIT)
        # a look puts the checkpoint off: it must come nearer by more than that
        shortest = max(_SHORTEST_AUTO_WAIT, self._look / (_SHARE * _PART_OF_LOOKS))
        return max(shortest, min(left / 2, _LONGEST_AUTO_WAIT))

    def looked(self, cost: float) -> None:
        """Notes the seconds that a look took, in which the workers wait for each other; the first makes functions."""
        self._spent += cost
        self._look = min(self._look or cost, cost)

    def _due(self) -> float:
        """The time of the next checkpoint."""
        if self._every.seconds is not None:
            return self._last + self._every.seconds
        return max(self._last + _LEAST_INTERVAL, self._began + (self._spent + self._cost) / _SHARE)

    def made(self, now: float, cost: float) -> None:
        """Notes a checkpoint within an epoch.

        Args:
            now: when training went on.
            cost: seconds that it stood still.
        """
        self._last = self._looked = now
        self._spent, self._cost = self._spent + cost, cost

    def epoch_ended(self, now: float, step: int) -> None:
        """Notes a checkpoint at the end of an epoch, which costs what it costs anyhow."""
        self._last = self._looked = now
        self._looked_at = step
