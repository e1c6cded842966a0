"""Parses `checkpoint_every`, and computes when a checkpoint within an epoch is due. Pure functions."""

from __future__ import annotations

import dataclasses
import math
import re

from raytf.errors import ConfigError

_TEXT = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]+)")
_UNITS = {"s": 1.0, "sec": 1.0, "min": 60.0, "h": 3600.0}
_STEPS = ("step", "steps")
# With "auto": share of the time that checkpoints and checks may cost, and shortest interval in seconds.
_SHARE, _LEAST_INTERVAL = 0.01, 30.0
# Estimated cost of the first checkpoint in seconds, on a busy machine: it compiles functions.
_FIRST_COST = 1.0
# Longest time between two checks of the chief, in seconds, as the duration of steps changes. With "auto" the exact time
# matters less, and checks may cost a part of the share of checkpoints.
_LONGEST_WAIT = 5.0
_SHORTEST_AUTO_WAIT, _LONGEST_AUTO_WAIT, _PART_OF_CHECKS = 1.0, 15.0, 0.2
_FIRST_CHECK = 4


@dataclasses.dataclass(frozen=True)
class CheckpointInterval:
    """Parsed `checkpoint_every`. Each epoch ends with a checkpoint in any case.

    Args:
        steps: Interval in steps, or None.
        seconds: Interval in seconds after the last checkpoint, or None.
        auto: Whether to save as often as it costs at most 1 % of the time.
    """

    steps: int | None = None
    seconds: float | None = None
    auto: bool = False

    @property
    def is_within_epochs(self) -> bool:
        return self != CheckpointInterval()


def parse_interval(given: object) -> CheckpointInterval:
    """Parses `checkpoint_every`: "auto", "epoch", "100 steps", "30 s", "10 min", "2 h".

    Raises:
        ConfigError: The value is something else.
    """
    if given == "epoch":
        return CheckpointInterval()
    if given == "auto":
        return CheckpointInterval(auto=True)
    match = _TEXT.fullmatch(given.strip()) if isinstance(given, str) else None
    number, unit = (float(match[1]), match[2]) if match else (0.0, "")
    if number > 0 and math.isfinite(number):
        if unit in _STEPS and number.is_integer():
            return CheckpointInterval(steps=int(number))
        if unit in _UNITS:
            return CheckpointInterval(seconds=number * _UNITS[unit])
    raise ConfigError(
        'checkpoint_every must be "auto", "epoch", or a number above 0 of steps, s, min or h',
        repr(given),
        'Use "100 steps" or "10 min", for example',
    )


def parse_steps(given: object) -> int | None:
    """Parses `memory_every`: "10 steps", or None.

    Raises:
        ConfigError: The value is something else.
    """
    if given is None:
        return None
    try:
        interval = parse_interval(given).steps
    except ConfigError:
        interval = None
    if interval is None:
        raise ConfigError(
            "memory_every must be a number of steps above 0, or None", repr(given), 'Use "10 steps", for example'
        )
    return interval


def crosses_multiple(interval: int, first: int, last: int) -> bool:
    """Returns whether (first, last] contains a multiple of `interval` steps."""
    return first // interval < last // interval


class CheckpointClock:
    """Computes on the chief when a checkpoint is due by time, and after how many steps to check again.

    A check is an exchange between the workers, so there are few. Each one comes when half of the time to the next
    checkpoint is over.

    Args:
        interval: Interval with `seconds`, or `auto`.
        now: Seconds of a monotonic clock.
        step: Number of steps so far.
    """

    def __init__(self, interval: CheckpointInterval, now: float, step: int):
        self._interval = interval
        self._began = self._last = self._last_check = now
        self._first = self._last_check_step = step
        self._cost_total, self._cost, self._next_check = 0.0, _FIRST_COST, 0.0

    def check(self, now: float, step: int) -> tuple[bool, int]:
        """Returns (whether a checkpoint is due, steps to the next check, at least 1)."""
        step_seconds = (now - self._last_check) / max(1, step - self._last_check_step)
        self._last_check, self._last_check_step = now, step
        remaining = self._due() - now
        if remaining <= 0:
            return True, 1
        # the first steps are no measure for later ones
        most = max(_FIRST_CHECK, step - self._first)
        return False, int(min(max(1.0, self._wait(remaining) / max(step_seconds, 1e-6)), most))

    def _wait(self, remaining: float) -> float:
        """Returns the seconds to the next check, if `remaining` seconds remain to the next checkpoint."""
        if not self._interval.auto:
            return min(remaining / 2, _LONGEST_WAIT)
        # a check delays the checkpoint: the interval must be longer than that delay
        shortest = max(_SHORTEST_AUTO_WAIT, self._next_check / (_SHARE * _PART_OF_CHECKS))
        return max(shortest, min(remaining / 2, _LONGEST_AUTO_WAIT))

    def checked(self, cost: float) -> None:
        """Records the seconds of a check, in which the workers wait for each other; the first compiles functions."""
        self._cost_total += cost
        self._next_check = min(self._next_check or cost, cost)

    def _due(self) -> float:
        """Returns the time of the next checkpoint."""
        if self._interval.seconds is not None:
            return self._last + self._interval.seconds
        return max(self._last + _LEAST_INTERVAL, self._began + (self._cost_total + self._cost) / _SHARE)

    def made(self, now: float, cost: float) -> None:
        """Records a checkpoint within an epoch.

        Args:
            now: Time at which training continues.
            cost: Seconds for which training paused.
        """
        self._last = self._last_check = now
        self._cost_total, self._cost = self._cost_total + cost, cost

    def epoch_ended(self, now: float, step: int) -> None:
        """Records a checkpoint at the end of an epoch, whose cost does not count, as it is always saved."""
        self._last = self._last_check = now
        self._last_check_step = step
