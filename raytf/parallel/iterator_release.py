"""Ends iterators over `tf.data` pipelines in the background, as TensorFlow may take up to a minute for it.

An iterator with autotuning has a thread that wakes up ever more rarely, at last once a minute. The end of the iterator
waits for that thread. In about a third of all cases (TensorFlow 2.21) the thread is not woken. It sleeps for up to the
iterator's age. All workers would wait for one of them at the end of an epoch. Only the exit of Python waits: a thread
that requests Python's lock in a C++ destructor then aborts the process.
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

# Seconds of waiting at Python's exit before a message; `timeouts` limits the wait to a little over a minute.
_QUIET_INTERVAL = 5.0


class _IteratorReaper:
    """The iterators that end in separate threads. It has no lock, as the code that an end interrupts may hold it."""

    def __init__(self):
        self._resources: dict[int, list] = {}
        self._of_parents: list[dict] = []
        self._closed = False

    @property
    def closed(self) -> bool:
        """Returns whether no more iterators are accepted, as Python exits."""
        return self._closed or sys.is_finalizing()

    def begin(self, resources: list) -> None:
        """Frees the contents of a list in another thread, if only the list holds them."""
        self._resources[id(resources)] = resources
        _thread.start_new_thread(self._free, (resources,))

    def _free(self, resources: list) -> None:
        resources.clear()
        del self._resources[id(resources)]

    def close(self) -> None:
        """Waits for all of them; they need no Python lock to continue."""
        self._closed = True
        began, warned = time.monotonic(), False
        while self._resources:
            waited = time.monotonic() - began
            if waited > _QUIET_INTERVAL and not warned:
                warned = True
                logger.warning(
                    "this process ends when TensorFlow has freed its iterators over tf.data, which may take a minute"
                )
            if waited > timeouts.get().iterator_end:
                logger.warning(
                    f"timeout: TensorFlow has not freed {len(self._resources)} iterators over tf.data; the process ends"
                )
                return
            time.sleep(0.01)

    def forget(self) -> None:
        """Forgets them in a fork, which has none of the threads: their contents are never freed."""
        self._of_parents.append(self._resources)
        self._resources = {}


_reaper = _IteratorReaper()
atexit.register(_reaper.close)
os.register_at_fork(after_in_child=_reaper.forget)


@patch((OwnedIterator, "__del__"))
def release_iterator(original, self):
    """Ends an iterator in a separate thread instead of the training's, if TensorFlow may wait for it."""
    if _reaper is None or _reaper.closed:  # Python empties modules as it ends
        return
    dataset = dataset_of(self)
    resource = None if dataset is None else take_resource(self)
    if resource is None or tf.is_symbolic_tensor(resource):
        return
    with tf.init_scope():  # a function may be traced meanwhile, and TensorFlow would warn of this read
        tunes = dataset.options().autotune.enabled is not False
    if not tunes:
        return
    # Its functions are called until the end. Only the list holds both, so that the thread frees them.
    resources = [resource, dataset]
    del resource, dataset
    _reaper.begin(resources)
