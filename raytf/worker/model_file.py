"""A model's `.keras` file, again and again, without Keras' writing it: once it does, then only arrays are copied.

A `.keras` file is a zip of config.json, metadata.json, an HDF5 with the arrays, and assets such as vocabularies. Keras
packs nothing, and each array of the HDF5 lies in one piece, whose place h5py tells. So the file that Keras wrote is an
image for all later ones: which array is whose is found by Keras' own walk over what it saves, and checked by values.
What a layer makes for the file (`save_own_variables`) is asked for each time. Where more has changed of the model than
its values (layers, optimizers, shapes), Keras writes an image anew.
"""

from __future__ import annotations

import contextlib
import datetime
import io
import json
import os
import warnings
import zipfile
from typing import Any

import h5py
import numpy as np

from raytf.compat import keras as compat_keras
from raytf.compat import keras_objects
from raytf.parallel import model_optimizers
from raytf.storage import scratch
from raytf.storage.images import Archive, Image

_WEIGHTS, _CONFIG, _METADATA = "model.weights.h5", "config.json", "metadata.json"


class ModelFile:
    """Gives the content of a model's `.keras` file, as `model.save` would write it at that moment.

    Args:
        model: compiled and built. Its vocabularies do not change any more.
    """

    def __init__(self, model):
        self._model = model
        self._again = 0
        self._make()

    def content(self) -> Archive:
        """The file as the model is now; its arrays may be TensorFlow's own memory: copy them before the next step."""
        layers, optimizers = self._parts()
        if _ids(layers, optimizers) != self._made_of:
            self._make()
        values = self._values()
        if values is None:
            self._tell_again()
            self._make()
            values = self._values() or []  # without places Keras has written it just now, and it is taken as it is
        if (now := _configured(layers, optimizers)) != self._made_with:
            self._config, self._made_with = self._described(), now
        members = {**self._members, _CONFIG: self._config, _METADATA: self._dated()}
        return Archive([(name, members[name]) for name in self._members], self._image, values)

    def _make(self) -> None:
        """Has Keras write the file, and looks where in it the arrays lie."""
        with scratch.folder() as folder:
            path = os.path.join(folder, "model.keras")
            with describable(self._model):
                self._model.save(path)
            with zipfile.ZipFile(path) as archive:
                found = {name: archive.read(name) for name in archive.namelist()}
        places, checked = _datasets(found[_WEIGHTS])
        self._saved = self._owners()
        self._order = None
        if self._saved is not None:
            state = self._state()
            same = state.keys() == places.keys() and all(
                places[path][0] >= 0 and _is_same(value, checked[path]) for path, value in state.items()
            )
            if same:
                self._order = list(places)
                self._kinds = [(checked[path].shape, state[path].dtype) for path in self._order]
        # without an order the image is used once, as it is
        self._image = Image(found[_WEIGHTS], [places[path] for path in self._order or ()])
        self._members: dict[str, bytes | Image] = {**found, _WEIGHTS: self._image}
        self._config, self._metadata = found[_CONFIG], json.loads(found[_METADATA])
        layers, optimizers = self._parts()
        self._made_of, self._made_with = _ids(layers, optimizers), _configured(layers, optimizers)

    def _owners(self) -> list[tuple[str, Any]] | None:
        """(path, layer or optimizer) of what is in the HDF5, or None where one of them is nothing that is known."""
        layers, optimizers = self._parts()
        known = {id(o): o for o in (*layers, *optimizers)}
        found = compat_keras.saved_paths(self._model)
        if any(identity not in known for _, identity in found):
            return None
        return [(path, known[identity]) for path, identity in found]

    def _state(self) -> dict[str, np.ndarray]:
        """The arrays of the HDF5 by their path in it."""
        return {
            f"{path}/vars/{key}".lstrip("/"): compat_keras.as_array(value)
            for path, owner in self._saved or ()
            for key, value in compat_keras.own_state(owner).items()
        }

    def _values(self) -> list[np.ndarray] | None:
        """The arrays in the order of the image's places; None where they are others than when it was made."""
        if self._order is None:
            return None
        state = self._state()
        if len(state) != len(self._order):
            return None
        values = [state.get(path) for path in self._order]
        if any(
            value is None or (value.shape, value.dtype) != kind for value, kind in zip(values, self._kinds, strict=True)
        ):
            return None
        return values  # type: ignore[return-value]

    def _parts(self) -> tuple[list, list]:
        """(layers, optimizers) of the model, with those within others."""
        found = list(model_optimizers.of(self._model).values())
        inner = [optimizer.inner_optimizer for optimizer in found if hasattr(optimizer, "inner_optimizer")]
        return keras_objects.layers_of(self._model), found + inner

    def _described(self) -> bytes:
        with describable(self._model):
            return compat_keras.config_and_metadata(self._model)[0].encode()

    def _dated(self) -> bytes:
        return json.dumps(
            {**self._metadata, "date_saved": datetime.datetime.now().strftime("%Y-%m-%d@%H:%M:%S")}
        ).encode()

    def _tell_again(self) -> None:
        self._again += 1
        if self._again == 2:
            warnings.warn(
                "A part of the model writes into its file what is not an array of one shape: Keras writes such "
                "checkpoints, and training waits for it",
                stacklevel=4,
            )


def _ids(layers: list, optimizers: list) -> list[int]:
    """What tells that a model has other parts than before."""
    return [*map(id, layers), *map(id, optimizers)]


def _configured(layers: list, optimizers: list) -> tuple[list, list]:
    """What of config.json changes in a training: which layers are trained, and rates."""
    rates = [keras_objects.rate_of(optimizer) for optimizer in optimizers]
    numbers = [None if rate is None or callable(rate) else float(compat_keras.as_array(rate)) for rate in rates]
    return [layer.trainable for layer in layers], numbers


@contextlib.contextmanager
def describable(model):
    """A model that Keras cannot describe, such as a GAN given its parts, is saved without a description within it."""
    try:
        model.get_config()
    except NotImplementedError:
        vars(model)["get_config"] = dict
    try:
        yield
    finally:
        vars(model).pop("get_config", None)


def _datasets(content: bytes) -> tuple[dict[str, tuple[int, int]], dict[str, np.ndarray]]:
    """(offset, bytes), and the array, of each dataset of an HDF5; those without one place have the offset -1."""
    places, arrays = {}, {}

    def look(path, found):
        if isinstance(found, h5py.Dataset):
            arrays[path] = np.asarray(found[()])
            at = found.id.get_offset()
            at = 0 if not found.size else -1 if at is None or found.dtype.hasobject else at
            places[path] = at, found.size * found.dtype.itemsize

    with h5py.File(io.BytesIO(content), "r") as file:
        file.visititems(look)
    return places, arrays


def _is_same(value: np.ndarray, dataset: np.ndarray) -> bool:
    """Whether an array lies in a dataset byte for byte; a dtype that HDF5 does not know has another name there."""
    if value.dtype.hasobject or (value.shape, value.nbytes) != (dataset.shape, dataset.nbytes):
        return False
    return value.tobytes() == dataset.tobytes()
