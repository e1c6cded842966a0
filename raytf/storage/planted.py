"""Errors that a test plants in the writing of checkpoints, see `raytf.testing.FailWrite`; nothing else plants any.

They are kept in this process alone, and go with the next checkpoint to the process that writes it.
"""

from __future__ import annotations

_numbers: list[int] = []


def plant(number: int, times: int) -> None:
    """Has the next tries to write a checkpoint fail.

    Args:
        number: of the OSError.
        times: how many tries, at least 1.
    """
    _numbers.extend([number] * times)


def taken() -> list[int]:
    """The numbers that are planted, one a try, which from now on are no longer."""
    found = list(_numbers)
    _numbers.clear()
    return found
