"""float16 with a scale for each block: numbers with the range of float32 in little more than two bytes each.

float16 alone overflows at 65504 and loses numbers below 6e-8. Here the largest number of a block determines a power of
two, which is sent before the block. So nothing overflows, and small numbers keep their digits unless the block has much
larger ones. Infinities and NaN are kept, as loss scaling checks for them.
"""

from __future__ import annotations

import numpy as np

# Numbers in a block: with its scale it fills 4 KiB, a thousandth of it for the scale.
ITEMS = 2046
BLOCK = np.dtype([("scale", "<f4"), ("values", "<f2", ITEMS)])
# The largest number of a block is scaled below 2 ** 15, half of float16's range: rounding cannot overflow.
_TOP = 15
# Range of float32 exponents for which the scale and its inverse are normal numbers.
_LEAST, _MOST = -110, 128
# The largest float16 below 2 ** 15; float32's largest number would be rounded up to 2 ** 128.
_LARGEST = 32752.0


def blocks(items: int) -> int:
    """Returns the number of blocks that `items` numbers need."""
    return -(-items // ITEMS)


@np.errstate(over="ignore", invalid="ignore")
def encode(wide: np.ndarray, coded: np.ndarray) -> None:
    """Rounds numbers into blocks.

    Args:
        wide: float32, (blocks, `ITEMS`). It is overwritten.
        coded: `BLOCK`, (blocks,). Receives the result.
    """
    largest = np.maximum(wide.max(axis=1), -wide.min(axis=1))
    odd = ~np.isfinite(largest)
    if odd.any():
        largest[odd] = np.abs(np.where(np.isfinite(wide[odd]), wide[odd], 0)).max(axis=1)
    exponents = np.clip(np.frexp(largest)[1], _LEAST, _MOST)
    np.multiply(wide, np.ldexp(np.float32(1), _TOP - exponents)[:, None], out=wide)
    for i in np.flatnonzero(exponents == _MOST):
        wide[i] = np.where(np.isfinite(wide[i]), np.clip(wide[i], -_LARGEST, _LARGEST), wide[i])
    coded["values"] = wide
    coded["scale"] = np.ldexp(np.float32(1), exponents - _TOP)


@np.errstate(over="ignore", invalid="ignore")
def decode(coded: np.ndarray, wide: np.ndarray) -> None:
    """Decodes blocks that `encode` wrote.

    Args:
        coded: `BLOCK`, (blocks,).
        wide: float32, (blocks, `ITEMS`). Receives the result.
    """
    wide[...] = coded["values"]
    np.multiply(wide, coded["scale"][:, None], out=wide)
