"""float16 with a scale for each block: numbers of float32's range in little more than two bytes each.

float16 alone ends at 65504 and loses what is below 6e-8. Here the largest number of a block decides on a power of two,
which travels in front of the block, so that nothing overflows, and what is small beside nothing larger keeps its
digits. Infinities and NaN arrive as they are; loss scaling looks for them.
"""

from __future__ import annotations

import numpy as np

# Numbers of a block: with its scale it fills 4 KiB, a thousandth of it for the scale.
ITEMS = 2046
BLOCK = np.dtype([("scale", "<f4"), ("values", "<f2", ITEMS)])
# The largest number of a block is brought below 2 ** 15, half of what float16 holds, so that rounding stays within it.
_TOP = 15
# Of the exponents of float32's numbers those whose scale and its inverse are normal numbers, too.
_LEAST, _MOST = -110, 128
# The largest float16 below 2 ** 15; float32's largest number would be rounded up to 2 ** 128.
_LARGEST = 32752.0


def blocks(items: int) -> int:
    """The number of blocks that hold so many numbers."""
    return -(-items // ITEMS)


@np.errstate(over="ignore", invalid="ignore")
def encode(wide: np.ndarray, into: np.ndarray) -> None:
    """Rounds numbers into blocks.

    Args:
        wide: float32, (blocks, `ITEMS`); what it holds afterwards is of no use.
        into: `BLOCK`, (blocks,).
    """
    largest = np.maximum(wide.max(axis=1), -wide.min(axis=1))
    odd = ~np.isfinite(largest)
    if odd.any():
        largest[odd] = np.abs(np.where(np.isfinite(wide[odd]), wide[odd], 0)).max(axis=1)
    exponents = np.clip(np.frexp(largest)[1], _LEAST, _MOST)
    np.multiply(wide, np.ldexp(np.float32(1), _TOP - exponents)[:, None], out=wide)
    for i in np.flatnonzero(exponents == _MOST):
        wide[i] = np.where(np.isfinite(wide[i]), np.clip(wide[i], -_LARGEST, _LARGEST), wide[i])
    into["values"] = wide
    into["scale"] = np.ldexp(np.float32(1), exponents - _TOP)


@np.errstate(over="ignore", invalid="ignore")
def decode(coded: np.ndarray, into: np.ndarray) -> None:
    """What `encode` wrote into blocks.

    Args:
        coded: `BLOCK`, (blocks,).
        into: float32, (blocks, `ITEMS`).
    """
    into[...] = coded["values"]
    np.multiply(into, coded["scale"][:, None], out=into)
