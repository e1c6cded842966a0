"""The end of an iterator over a `tf.data` pipeline, which may take TensorFlow up to a minute, holds up nobody.

An iterator whose pipeline is tuned while it runs has a thread that looks at it ever more seldom, at last each minute.
Who ends the iterator waits for that thread, and about each third time (TensorFlow 2.21) it is not woken, but sleeps on:
up to as long as the iterator has been in use. Of several workers all would wait for one, at the end of an epoch.

Python's end alone waits, as it does without raytf: what is freed with an iterator asks for Python's lock (functions
keep the places in which they were traced), and a thread that asks for it while Python ends is ended itself, within a
destructor in C++, which aborts the process.
"""

from __future__ import annotations

import _thread
import atexit
import os
import sys
import time

import tensorflow as tf

from raytf import logs, timeouts
from raytf.compat.patching import patch
from raytf.compat.tensorflow import OwnedIterator, dataset_of, take_resource

logger = logs.get_logger(__name__)

# At the end of Python: after so long it says what it waits for, and no longer than TensorFlow's minute and some more.
_QUIET_INTERVAL = 5.0


class _Ends:
    """The iterators that end in threads of their own. It has no lock: who is interrupted by an end may hold that."""

    def __init__(self):
        self._held: dict[int, list] = {}
        self._of_parents: list[dict] = []
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether no more is taken, as Python ends."""
        return self._closed or sys.is_finalizing()

    def begin(self, held: list) -> None:
        """Frees what a list alone holds, in another thread."""
        self._held[id(held)] = held
        _thread.start_new_thread(self._free, (held,))

    def _free(self, held: list) -> None:
        held.clear()
        del self._held[id(held)]

    def close(self) -> None:
        """Waits for all, which go on without Python's lock."""
        self._closed = True
        began, told = time.monotonic(), False
        while self._held:
            waited = time.monotonic() - began
            if waited > _QUIET_INTERVAL and not told:
                told = True
                logger.warning(
                    "this process ends when TensorFlow has freed its iterators over tf.data, which may take a minute"
                )
            if waited > timeouts.get().iterator_end:
                logger.warning(
                    f"TensorFlow has not freed {len(self._held)} iterators over tf.data; the process ends all the same"
                )
                return
            time.sleep(0.01)

    def forget(self) -> None:
        """In a fork, which has none of the threads: what they hold is never freed."""
        self._of_parents.append(self._held)
        self._held = {}


_ends = _Ends()
atexit.register(_ends.close)
os.register_at_fork(after_in_child=_ends.forget)


@patch((OwnedIterator, "__del__"))
def end(original, self):
    """An iterator ends in a thread of its own, and not in the training's, if TensorFlow may keep it waiting."""
    if _ends.closed:
        return
    dataset = dataset_of(self)
    resource = None if dataset is None else take_resource(self)
    if resource is None or tf.is_symbolic_tensor(resource):
        return
    with tf.init_scope():  # a function may be traced meanwhile, where TensorFlow warns of who asks
        tunes = dataset.options().autotune.enabled is not False
    if not tunes:
        return
    # Its functions are called until the end. The list alone holds both, so that they go in that thread.
    held = [resource, dataset]
    del resource, dataset
    _ends.begin(held)
