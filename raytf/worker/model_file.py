"""A model's `.keras` file, again and again, without Keras' writing it: only arrays are copied.

A `.keras` file is a zip of config.json, metadata.json, an HDF5 with the arrays, and assets such as vocabularies. Keras
packs nothing, and each array of the HDF5 lies in one piece. So the file is laid out once from shapes, by Keras' own
walk over what it saves, without a number being written: that is an image for all later ones, and says which array is
whose. What a layer makes for the file (`save_own_variables`) is asked for each time. Where more has changed of the
model than its values (layers, optimizers, shapes), it is laid out anew.
"""

from __future__ import annotations

import contextlib
import datetime
import json

import numpy as np

from raytf.compat import keras as compat_keras
from raytf.compat import keras_objects
from raytf.parallel import model_optimizers
from raytf.storage import scattered, scratch
from raytf.storage.images import Archive, Image

_WEIGHTS, _CONFIG, _METADATA = "model.weights.h5", "config.json", "metadata.json"


class ModelFile:
    """Gives the content of a model's `.keras` file, as `model.save` would write it at that moment.

    Args:
        model: compiled and built. Its vocabularies do not change any more.
    """

    def __init__(self, model):
        self._model = model
        self._lay_out()

    @property
    def size(self) -> int:
        """Bytes of the file, but for some thousand of zip."""
        return self._image.size + sum(len(content) for content in self._members.values() if isinstance(content, bytes))

    def content(self) -> Archive:
        """The file as the model is now; its arrays may be TensorFlow's own memory: copy them before the next step."""
        layers, optimizers = self._parts()
        values = self._values() if _ids(layers, optimizers) == self._made_of else None
        if values is None:
            values = self._lay_out()
        if (now := _configured(layers, optimizers)) != self._made_with:
            self._config, self._made_with = self._described(), now
        members = {**self._members, _CONFIG: self._config, _METADATA: self._dated()}
        return Archive([(name, members[name]) for name in self._members], self._image, values)

    def pieces(self) -> list:
        """The file as pieces of memory; arrays by reference: use them before the next step."""
        archive = self.content()
        return scattered.archive(
            (name, content if isinstance(content, bytes) else content.pieces(archive.values))
            for name, content in archive.members
        )

    def _lay_out(self) -> list[np.ndarray]:
        """Finds from shapes where each array comes to lie, and whose it is; the arrays."""
        layers, optimizers = self._parts()
        with describable(self._model):
            made = compat_keras.saved_layout(self._model, optimizers, scratch.make)
        known = {id(o): o for o in (*layers, *optimizers)}
        is_known = made.fixed and all(identity in known for _, identity in made.owners)
        # without owners each checkpoint has a layout of its own
        self._owners = [(path, known[identity]) for path, identity in made.owners] if is_known else None
        self._order = list(made.places)
        self._kinds = [(made.values[path].shape, made.values[path].dtype) for path in self._order]
        self._image = Image(made.size, made.texts, [made.places[path] for path in self._order])
        self._members: dict[str, bytes | Image] = {**made.members, _WEIGHTS: self._image}
        self._config, self._metadata = made.members[_CONFIG], json.loads(made.members[_METADATA])
        self._made_of, self._made_with = _ids(layers, optimizers), _configured(layers, optimizers)
        return [made.values[path] for path in self._order]

    def _values(self) -> list[np.ndarray] | None:
        """The arrays in the order of the image's places; None where they are others than when it was laid out."""
        if self._owners is None:
            return None
        state = {
            f"{path}/vars/{key}".lstrip("/"): compat_keras.as_array(value)
            for path, owner in self._owners
            for key, value in compat_keras.own_state(owner).items()
        }
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
