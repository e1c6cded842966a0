"""JSON from storage: the one reader of files that others may have truncated, emptied or crafted.

Every defect of such a file is one error with one clause, which each caller puts into its own sentence.
"""

from __future__ import annotations

import json
from typing import Any

# Far above the output of a long training; a file of this size is not raytf's.
MOST_BYTES = 1 << 28


class UnreadableError(ValueError):
    """A file lacks the expected content; the message is a clause such as "is empty".

    Args:
        why: The clause.
        missing: Whether the file does not exist.
    """

    def __init__(self, why: str, missing: bool = False):
        super().__init__(why)
        self.missing = missing


def parse_value(text: str | bytes) -> Any:
    """Returns the value in a text.

    Raises:
        UnreadableError: The text is no JSON, no UTF-8, or nested too deeply.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        why = "is empty" if not text.strip() else f"is no JSON: {str(error).splitlines()[0]}"
        raise UnreadableError(why) from error


def parse_object(text: str | bytes) -> dict[str, Any]:
    """Returns the object in a text; see `parse_value`."""
    content_value = parse_value(text)
    if type(content_value) is not dict:
        raise UnreadableError("is not an object of JSON")
    return content_value


def read_bytes(filesystem, path: str) -> bytes:
    """Returns the bytes of a small file of a `pyarrow.fs.FileSystem`.

    Raises:
        UnreadableError: The file does not exist, or is far too large.
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
    except FileNotFoundError as error:  # removed in the meantime
        raise UnreadableError("is missing", True) from error


def read_object(filesystem, path: str) -> dict[str, Any]:
    """Returns the object in a file of a `pyarrow.fs.FileSystem`; see `parse_value` and `read_bytes`."""
    return parse_object(read_bytes(filesystem, path))
