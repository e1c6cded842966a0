"""Files of which only arrays change: they are made once, and then these are copied into them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np


class Image:
    """The bytes of a file in which only arrays change, at fixed places: it lies in each buffer, and these are copied.

    Args:
        content: the file as it was made once.
        places: where each array lies, as (offset, bytes).
    """

    def __init__(self, content: bytes, places: Sequence[tuple[int, int]]):
        self.content, self.places = content, list(places)


@dataclasses.dataclass(frozen=True)
class Archive:
    """A zip file of members that are not packed.

    Args:
        members: (name, content) in order; content is bytes, or the `image`.
        image: the member whose arrays are `values`.
        values: an array for each of the image's places, of as many bytes.
    """

    members: Sequence[tuple[str, bytes | Image]]
    image: Image
    values: Sequence[np.ndarray]


@dataclasses.dataclass(frozen=True)
class Piece:
    """A file that is an image with its values, as a range of another one is.

    Args:
        image: all of the file.
        values: an array for each of the image's places, of as many bytes.
    """

    image: Image
    values: Sequence[np.ndarray]
