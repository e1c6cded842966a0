"""Errors that a test injects into checkpoint writes, see `raytf.testing.FailWrite`; nothing else injects any.

They stay in this process, until the next checkpoint carries them to the writer process.
"""

from __future__ import annotations

_numbers: list[int] = []


def plan_faults(number: int, times: int) -> None:
    """Makes the next attempts to write a checkpoint fail.

    Args:
        number: The errno of the OSError.
        times: Number of attempts that fail, at least 1.
    """
    _numbers.extend([number] * times)


def take_faults() -> list[int]:
    """Returns and clears the injected errnos, one for each attempt."""
    numbers = list(_numbers)
    _numbers.clear()
    return numbers
