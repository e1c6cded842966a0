"""How many workers write a checkpoint: many workers of a large model do so together, as each has all of its weights."""

from __future__ import annotations

import warnings
from typing import Protocol

import numpy as np

from raytf.collectives import communicator
from raytf.parallel import model_optimizers

# Of a model's file; what is smaller is not worth another writer.
LEAST_BYTES = 64 << 20
# With fewer each of them would need more than a tenth of the checkpoint in memory.
FEWEST = 12
_LONGEST_NAME = 128


class Keeps(Protocol):
    """What a session with a storage of its own offers, see `session.RaySession`."""

    rank: int
    size: int

    def layout(self, model) -> int: ...

    def writes_alone(self) -> bool: ...


class Writers:
    """Agrees on the workers that write; each method is called by all of them at once.

    Args:
        session: this worker's.
    """

    def __init__(self, session: Keeps):
        self._session = session
        self._differs = False

    def count(self, model) -> int:
        """How many write a checkpoint of this moment; 1 is the chief alone.

        Args:
            model: a compiled and built `keras.Model`.
        """
        size, strategy = self._session.size, model.distribute_strategy
        variables = [*model.variables, *model_optimizers.variables(model)]
        wanted = min(size, sum(map(communicator.bytes_of, variables)) // LEAST_BYTES)
        if wanted < FEWEST or not communicator.spans_workers(strategy):
            return 1
        mine = np.array([self._session.layout(model), self._session.writes_alone()], np.int64)
        (told,) = communicator.from_chief(strategy, [mine])
        if told[1]:
            return 1
        (alike,) = communicator.sum_over_workers(strategy, [np.int64(told[0] == mine[0])])
        if int(alike) < size and not self._differs and self._session.rank == 0:
            warnings.warn(
                "Some workers write the model's file in another layout: the chief writes it alone. Have the same "
                "versions of Keras and h5py on all of them",
                stacklevel=2,
            )
        self._differs = int(alike) < size
        return 1 if self._differs else int(wanted)

    def name(self, model, name: str) -> str:
        """The chief's name on every worker.

        Args:
            model: as above.
            name: of at most 127 bytes; what others give is not looked at.
        """
        text = np.zeros(_LONGEST_NAME, np.uint8)
        text[: len(name)] = np.frombuffer(name.encode(), np.uint8)
        (told,) = communicator.from_chief(model.distribute_strategy, [text.view(np.int64)])
        return told.view(np.uint8).tobytes().rstrip(b"\0").decode()
