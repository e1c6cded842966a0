"""Agrees on how many workers write a checkpoint: all workers have all weights, or gather them together from shares."""

from __future__ import annotations

import numpy as np

from raytf import logs
from raytf.collectives import communicator
from raytf.parallel import model_optimizers, shards
from raytf.worker.session import RaySession

logger = logs.get_logger(__name__)

# Bytes of a model's file for each writer; less is not worth another writer.
LEAST_BYTES = 64 << 20
# Minimum of writers: with fewer, each would need more than a tenth of the checkpoint in memory. With shares of the
# optimizer's state each worker has given up more memory than that, so two are enough.
FEWEST = 12
_FEWEST_WITH_SHARES = 2
_LONGEST_NAME = 128


class WriterCount:
    """Agrees on the workers that write. Each method but `most` is a collective call.

    Args:
        session: Session of this worker.
    """

    def __init__(self, session: RaySession):
        self._session = session
        self._differs = False

    def most(self, model) -> int:
        """Returns the number of workers that would write a checkpoint if nothing prevents them."""
        if not communicator.spans_workers(model.distribute_strategy):
            return 1
        variables = [*model.variables, *model_optimizers.alike(model), *shards.sharded_variables(model)]
        count = min(self._session.size, sum(map(communicator.bytes_of, variables)) // LEAST_BYTES)
        return 1 if count < (_FEWEST_WITH_SHARES if shards.has_shards(model) else FEWEST) else int(count)

    def count(self, model) -> int:
        """Returns the number of workers that write a checkpoint of the current state; 1 is the chief alone.

        Args:
            model: A compiled and built `keras.Model`.
        """
        size, strategy, count = self._session.size, model.distribute_strategy, self.most(model)
        if count == 1:
            return 1
        own_layout = np.array([self._session.layout(model), self._session.writes_all_parts()], np.int64)
        (chief_layout,) = communicator.broadcast_from_chief(strategy, [own_layout])
        if chief_layout[1]:
            return 1
        (equal_count,) = communicator.sum_over_workers(strategy, [np.int64(chief_layout[0] == own_layout[0])])
        if int(equal_count) < size and not self._differs and self._session.rank == 0:
            logger.warning(
                "Some workers write the model's file in another layout: the chief writes it alone. Have the same "
                "versions of Keras and h5py on all of them"
            )
        self._differs = int(equal_count) < size
        return 1 if self._differs else count

    def name(self, model, name: str) -> str:
        """Broadcasts the chief's name to every worker.

        Args:
            model: A compiled and built `keras.Model`.
            name: Name of at most 127 bytes; only the chief's is used.
        """
        text = np.zeros(_LONGEST_NAME, np.uint8)
        text[: len(name)] = np.frombuffer(name.encode(), np.uint8)
        (chief_name,) = communicator.broadcast_from_chief(model.distribute_strategy, [text.view(np.int64)])
        return chief_name.view(np.uint8).tobytes().rstrip(b"\0").decode()
