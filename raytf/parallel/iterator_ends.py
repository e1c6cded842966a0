"""The end of an iterator over a `tf.data` pipeline, which may take TensorFlow up to a minute, holds up nobody.

An iterator whose pipeline is tuned while it runs has a thread that looks at it ever more seldom, at last each minute.
Who ends the iterator waits for that thread, and about each third time (TensorFlow 2.21) it is not woken, but sleeps on:
up to as long as the iterator has been in use. Of several workers all would wait for one, at the end of an epoch.
"""

from __future__ import annotations

import _thread
import sys

import tensorflow as tf

from raytf.compat.patching import patch
from raytf.compat.tensorflow import OwnedIterator, dataset_of, take_resource


@patch((OwnedIterator, "__del__"))
def end(original, self):
    """An iterator ends in a thread of its own, and not in the training's, if TensorFlow may keep it waiting."""
    if sys.is_finalizing():
        return
    dataset = dataset_of(self)
    if dataset is None or dataset.options().autotune.enabled is False:
        return
    resource = take_resource(self)
    if resource is None or tf.is_symbolic_tensor(resource):
        return
    # Its functions are called until the end. The list alone holds both, so that they go in that thread.
    held = [resource, dataset]
    del resource, dataset
    _thread.start_new_thread(held.clear, ())  # `threading` has locks, which who is interrupted by this may hold
