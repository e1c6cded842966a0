"""Broadcasts the parts of a checkpoint that only the chief has, such as the state of its callbacks."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping

import numpy as np

from raytf.collectives import communicator
from raytf.storage import stored_json

_NUMBER = np.dtype(np.int64)


def broadcast_parts(strategy, parts: Mapping[str, str | Mapping[str, np.ndarray]]) -> dict:
    """Broadcasts the chief's parts to every worker. A collective call.

    Args:
        strategy: Strategy for which `communicator.spans_workers` holds.
        parts: Result of `checkpoint.checkpoint_parts` on the chief; ignored on other workers.
    """
    packed = pack_parts(parts) if communicator.is_chief(strategy) else np.empty(0, _NUMBER)
    (size,) = communicator.broadcast_from_chief(strategy, [np.int64(packed.size)])
    if packed.size != size:
        packed = np.empty(int(size), _NUMBER)
    (received,) = communicator.broadcast_from_chief(strategy, [packed])
    return unpack_parts(received)


def pack_parts(parts: Mapping[str, str | Mapping[str, np.ndarray]]) -> np.ndarray:
    """Packs strings, and arrays by name, into one array of int64."""
    texts = {name: part for name, part in parts.items() if isinstance(part, str)}
    keys = [(name, key) for name, part in parts.items() if not isinstance(part, str) for key in part]
    names = [name for name in parts if name not in texts]
    file = io.BytesIO()
    head = json.dumps([texts, names, keys]).encode()
    arrays = {str(i): np.asarray(parts[name][key]) for i, (name, key) in enumerate(keys)}
    np.savez(file, head=np.frombuffer(head, np.uint8), **arrays)
    content = file.getvalue()
    packed = np.zeros(1 - (-len(content) // _NUMBER.itemsize), _NUMBER)
    packed[0] = len(content)
    packed[1:].view(np.uint8)[: len(content)] = np.frombuffer(content, np.uint8)
    return packed


def unpack_parts(packed: np.ndarray) -> dict:
    """Unpacks an array of `pack_parts`. A dtype that NumPy lacks becomes one with as many bytes."""
    content = packed[1:].view(np.uint8)[: int(packed[0])].tobytes()
    with np.load(io.BytesIO(content), allow_pickle=False) as archive:
        texts, names, keys = stored_json.parse_value(archive["head"].tobytes())
        parts: dict = {**texts, **{name: {} for name in names}}
        for i, (name, key) in enumerate(keys):
            parts[name][key] = archive[str(i)]
    return parts
