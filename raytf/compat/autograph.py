"""Keeps code that AutoGraph generates from Python functions in memory: TensorFlow writes a file for each.

The files stay in the temporary folder until Python exits. A worker that Ray or a signal kills never removes them.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import linecache
import secrets
import sys
import types
from collections.abc import Iterator

from raytf.compat.patching import patched


@contextlib.contextmanager
def in_memory() -> Iterator[None]:
    """Keeps AutoGraph's code in memory instead of files; tracebacks and `inspect.getsource` still show it."""
    from raytf.compat.tensorflow import autograph_loader

    names: list[str] = []

    def load(source: str, delete_on_exit: bool) -> tuple[types.ModuleType, str]:
        module = _module(source)
        names.append(module.__file__)
        return module, module.__file__

    with patched(autograph_loader(), "load_source", load):
        try:
            yield
        finally:
            for name in names:
                linecache.cache.pop(name, None)


class _SourceLoader:
    """Loader of a module's source for `importlib`."""

    def __init__(self, source: str, path: str):
        self._source, self._path = source, path

    def create_module(self, spec) -> None:
        """Returns None, for the usual module."""

    def exec_module(self, module: types.ModuleType) -> None:
        exec(compile(self._source, self._path, "exec"), vars(module))

    def get_source(self, name: str) -> str:
        return self._source


def _module(source: str) -> types.ModuleType:
    name = f"__autograph_generated_file{secrets.token_hex(8)}"
    path = f"<raytf>/{name}.py"
    spec = importlib.machinery.ModuleSpec(name, _SourceLoader(source, path), origin=path)
    spec.has_location = True  # sets `__file__`, by which AutoGraph maps lines to the user's
    module = importlib.util.module_from_spec(spec)
    # without a time: `linecache` does not look for it on the disk
    linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
    spec.loader.exec_module(module)
    sys.modules[name] = module
    return module
