"""How long to wait for what moves a model's bytes, or makes its first step: longer for a larger model. Pure."""

from __future__ import annotations

import dataclasses

from raytf.storage.finishing import BYTES_A_SECOND

# A process makes its first step, or waits for its peers', in at most so many times what another one took.
_TIMES = 3.0


def deadline(least: float, bytes: int = 0, first_step_seconds: float = 0.0) -> float:
    """Seconds in which something must have happened.

    Args:
        least: seconds for what depends on no model.
        bytes: of the model's state that are sent, read or written once meanwhile.
        first_step_seconds: of a worker's first step, with what compiles it, where another process makes its first one
            meanwhile, or comes to the end of a step.

    Returns:
        `least`, and more for these: a second for each 25 MB, and three times the first step.
    """
    return least + bytes / BYTES_A_SECOND + _TIMES * first_step_seconds


@dataclasses.dataclass(frozen=True)
class Pace:
    """What a worker's training is like, as far as deadlines follow from it.

    Args:
        bytes: of the model's and its optimizers' variables.
        first_step_seconds: from the begin of the training to the end of its first step; to now, before that.
    """

    bytes: int = 0
    first_step_seconds: float = 0.0

    def deadline(self, least: float, copies: int = 0, first_steps: int = 0) -> float:
        """Seconds for so many copies of the state, one after the other, and so many first steps; see `deadline`."""
        return deadline(least, copies * self.bytes, first_steps * self.first_step_seconds)

    @staticmethod
    def slowest(paces) -> Pace:
        """The most of each."""
        return Pace(max(its.bytes for its in paces), max(its.first_step_seconds for its in paces))
