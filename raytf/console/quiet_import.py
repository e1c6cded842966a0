"""TensorFlow's native start-up lines, kept back where the user's own code imports it after raytf.

They come with the import of TensorFlow and when it first looks for devices, in whatever line that happens.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys

from raytf.compat import devices
from raytf.console import quiet


def when_imported() -> None:
    """Makes the first import of TensorFlow in this process a quiet one; nothing if it is imported already."""
    # a worker of Ray's says what it says to the driver, which shows the rest (`output.py`)
    is_worker = os.path.basename(sys.argv[0] if sys.argv else "") == "default_worker.py"
    if is_worker or "tensorflow" in sys.modules or any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Finds TensorFlow as the others do, once, and has it loaded quietly."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname != "tensorflow":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, original):
        self._original = original

    def create_module(self, spec):
        return self._original.create_module(spec)

    def exec_module(self, module) -> None:
        module.__spec__.loader = module.__loader__ = self._original
        with quiet.native(ends_start=False):
            self._original.exec_module(module)
        _look_for_devices_quietly()


def _look_for_devices_quietly() -> None:
    devices.look_for_devices(quiet.native)
