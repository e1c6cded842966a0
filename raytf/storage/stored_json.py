"""JSON from storage: the one reader of files that others may have cut off, emptied or crafted.

Whatever is wrong with such a file is one error with one clause, of which each place makes its own sentence.
"""

from __future__ import annotations

import json
import os
from typing import Any

# Far above what a long training writes; a file of this size is none of ours.
MOST_BYTES = 1 << 28


class UnreadableError(ValueError):
    """A file does not hold what is looked for; the message is a clause, as "is empty".

    Args:
        why: the clause.
        missing: whether there is no such file.
    """

    def __init__(self, why: str, missing: bool = False):
        super().__init__(why)
        self.missing = missing


def value(text: str | bytes) -> Any:
    """The value in a text.

    Raises:
        UnreadableError: it is no JSON, no UTF-8, or nested too deeply.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        why = "is empty" if not text.strip() else f"is no JSON: {str(error).splitlines()[0]}"
        raise UnreadableError(why) from error


def parsed(text: str | bytes) -> dict[str, Any]:
    """The object in a text; see `value`."""
    found = value(text)
    if type(found) is not dict:
        raise UnreadableError("is not an object of JSON")
    return found


def load(path: str) -> dict[str, Any]:
    """The object in a file of this machine; see `value`."""
    if not os.path.isfile(path):
        raise UnreadableError("is not a file" if os.path.lexists(path) else "is missing", not os.path.lexists(path))
    if os.path.getsize(path) > MOST_BYTES:
        raise UnreadableError(f"has {os.path.getsize(path)} bytes")
    with open(path, "rb") as file:
        return parsed(file.read())


def content(filesystem, path: str) -> bytes:
    """The bytes of a small file of a `pyarrow.fs.FileSystem`.

    Raises:
        UnreadableError: there is none, or it is far too large.
    """
    info = filesystem.get_file_info(path)
    if not info.is_file:
        missing = info.type.name == "NotFound"
        raise UnreadableError("is missing" if missing else "is not a file", missing)
    if info.size is not None and info.size > MOST_BYTES:
        raise UnreadableError(f"has {info.size} bytes")
    try:
        with filesystem.open_input_stream(path) as file:
            return file.read()
    except FileNotFoundError as error:  # removed meanwhile
        raise UnreadableError("is missing", True) from error


def fetched(filesystem, path: str) -> dict[str, Any]:
    """The object in a file of a `pyarrow.fs.FileSystem`; see `value` and `content`."""
    return parsed(content(filesystem, path))
