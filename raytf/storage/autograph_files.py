"""Files that AutoGraph writes, one for each Python function that it converts: in a folder of this process.

TensorFlow leaves them in the temporary folder until Python ends, which a worker that Ray ends never reaches.
"""

from __future__ import annotations

import contextlib
import tempfile

from raytf.storage import scratch


@contextlib.contextmanager
def removed():
    """Within it they go to a folder of `scratch`, which is removed behind; nothing within another.

    They are read for tracebacks only. What a process that is killed leaves there, the next one on its host removes.
    """
    from raytf.compat.tensorflow import autograph_loader

    loader = autograph_loader()
    if isinstance(loader.tempfile, _InFolder):
        yield
        return
    before, loader.tempfile = loader.tempfile, _InFolder()
    try:
        yield
    finally:
        ours, loader.tempfile = loader.tempfile, before
        ours.remove()


class _InFolder:
    """The module `tempfile`, as far as AutoGraph's loader uses it; the folder is made for the first file."""

    def __init__(self):
        self._folder: str | None = None

    def NamedTemporaryFile(self, **arguments):
        if self._folder is None:
            self._folder = scratch.make()
        return tempfile.NamedTemporaryFile(dir=self._folder, **arguments)

    def remove(self) -> None:
        if self._folder is not None:
            scratch.remove(self._folder)
