"""Broadcasts Python objects from the chief to all workers over a strategy's collectives; nothing unsigned is unpickled.

Data between hosts may be changed on its way, and a pickle is code. So it carries an HMAC with the ring's token, which
only the workers have. The HMAC covers the object and a random number of each worker, so changed and replayed objects
are refused.
"""

from __future__ import annotations

import hmac
import pickle
import secrets
from typing import Any

import numpy as np
import ray.cloudpickle

from raytf.collectives import communicator, ring_token
from raytf.compat.tensorflow import rank
from raytf.errors import ConfigError, RaytfError

_NONCE_BYTES = 16
_PROOF_BYTES = 32


def pack(value: Any, token: bytes, nonces: np.ndarray) -> np.ndarray:
    """Returns the HMAC of an object and its bytes: uint8, (bytes,).

    Args:
        value: An object that cloudpickle can pickle.
        token: Token of the ring.
        nonces: Random numbers of all workers, by rank: integers, (workers, ...).
    """
    content = ray.cloudpickle.dumps(value)
    return np.frombuffer(_proof(content, token, nonces) + content, np.uint8)


def unpack(message: np.ndarray, token: bytes, nonces: np.ndarray) -> Any:
    """Returns the object of `pack`.

    Raises:
        RaytfError: It was signed with another token, or for other nonces. It is not unpickled then.
    """
    whole = message.tobytes()
    proof, content = whole[:_PROOF_BYTES], whole[_PROOF_BYTES:]
    if not hmac.compare_digest(proof, _proof(content, token, nonces)):
        raise RaytfError(
            "An object from the chief was changed on its way to this worker, so it is not unpickled; received: "
            f"{len(content)} bytes with another signature. Use a network that only the run's hosts can write to."
        )
    return pickle.loads(content)


def _proof(content: bytes, token: bytes, nonces: np.ndarray) -> bytes:
    return hmac.digest(token, np.ascontiguousarray(nonces).tobytes() + content, "sha256")


def broadcast(strategy, value: Any) -> Any:
    """Returns the chief's object on every worker; all call it at once, between steps.

    Args:
        strategy: A strategy for which `communicator.spans_workers` holds.
        value: The object; only the chief's is used.

    Raises:
        ConfigError: These processes have no token.
        RaytfError: The object was changed on its way, see `unpack`.
    """
    token = ring_token.token()
    if token is None:
        raise ConfigError(
            "An object travels between workers with a signature, for which they need a common token",
            "workers without one",
            "Start them with a trainer of raytf or `raytf run`",
        )
    workers = strategy.num_replicas_in_sync // communicator.local_replicas(strategy)
    drawn = np.zeros((workers, _NONCE_BYTES // 4), np.int32)
    drawn[rank(strategy)] = np.frombuffer(secrets.token_bytes(_NONCE_BYTES), np.int32)
    (nonces,) = communicator.sum_over_workers(strategy, [drawn])
    nonces = np.array(nonces)
    nonces[rank(strategy)] = drawn[rank(strategy)]  # keeps this worker's own nonce, whatever the sum contains
    sent = pack(value, token, nonces).astype(np.int32) if communicator.is_chief(strategy) else np.zeros(0, np.int32)
    (size,) = communicator.broadcast_from_chief(strategy, [np.int64(sent.size)])
    room = np.zeros(int(size), np.int32)
    room[: sent.size] = sent
    (got,) = communicator.broadcast_from_chief(strategy, [room])
    return unpack(got.astype(np.uint8), token, nonces)
