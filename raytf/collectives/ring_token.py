"""The secret token with which a process joins rings, and the number of its next ring. In memory only."""

from __future__ import annotations

import secrets

TOKEN_BYTES = 32
_token: bytes | None = None
_generation = 0


def new_token() -> bytes:
    """Returns a token for one ring; each start of a group of processes uses another one."""
    return secrets.token_bytes(TOKEN_BYTES)


def keep_token(token: bytes, generation: int = 0) -> None:
    """Sets the secret token with which this process joins raytf's ring. It is kept in memory only.

    raytf's trainers and `raytf run` call it before the strategy is built.

    Args:
        token: `TOKEN_BYTES` random bytes, the same in all processes of the ring. Send them over a private channel.
        generation: Number of the next ring, 0 <= generation < 2**32, the same in all processes. Each further ring of
            the process has the next number.

    Example:
        >>> from raytf.collectives import ring_token
        >>> ring_token.keep_token(ring_token.new_token())
    """
    global _token, _generation
    _token, _generation = token, generation


def token() -> bytes | None:
    """Returns the token that was set by `keep_token`, or None."""
    return _token


def next_generation() -> int:
    """Returns the generation of the next ring that this process joins."""
    return _generation


def was_joined(generation: int) -> None:
    """Records that a ring of that generation was joined; the next one has a higher generation."""
    global _generation
    _generation = max(_generation, generation + 1)
