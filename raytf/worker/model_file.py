"""Creates a model's `.keras` file repeatedly without Keras' serialization: only arrays are copied.

A `.keras` file is an uncompressed zip: config.json, metadata.json, an HDF5 file with the arrays, and assets such as
vocabularies. Each array of the HDF5 file is contiguous. So Keras' own walk over the saved objects computes the layout
once, from shapes. The layout is a template of the file, and the owner of each array. `save_own_variables` of layers is
called each time. If layers, optimizers or shapes change, the layout is computed again.
"""

from __future__ import annotations

import contextlib
import datetime
import json

import numpy as np

from raytf.compat import keras as compat_keras
from raytf.compat import keras_objects
from raytf.parallel import model_optimizers
from raytf.storage import gather_io, scratch
from raytf.storage.file_template import FileTemplate, ZipTemplate

_WEIGHTS, _CONFIG, _METADATA = "model.weights.h5", "config.json", "metadata.json"


class ModelFile:
    """Returns the content of a model's `.keras` file, as `model.save` would write it now.

    Args:
        model: A compiled and built model, whose vocabularies do not change any more.
    """

    def __init__(self, model):
        self._model = model
        self._lay_out()

    @property
    def size(self) -> int:
        """Returns the size of the file in bytes, without some thousand bytes of zip headers."""
        return self._template.size + sum(
            len(content) for content in self._members.values() if isinstance(content, bytes)
        )

    def content(self) -> ZipTemplate:
        """Returns the current file. Its arrays may share TensorFlow's memory: copy them before the next step."""
        layers, optimizers = self._parts()
        values = self._values() if _ids(layers, optimizers) == self._made_of else None
        if values is None:
            values = self._lay_out()
        if (configured := _configured(layers, optimizers)) != self._made_with:
            self._config, self._made_with = self._described(), configured
        members = {**self._members, _CONFIG: self._config, _METADATA: self._dated()}
        return ZipTemplate([(name, members[name]) for name in self._members], self._template, values)

    def pieces(self) -> list:
        """Returns the file as pieces of memory, with arrays by reference: use them before the next step."""
        archive = self.content()
        return gather_io.zip_pieces(
            (name, content if isinstance(content, bytes) else content.pieces(archive.values))
            for name, content in archive.members
        )

    def _lay_out(self) -> list[np.ndarray]:
        """Computes from shapes the offset and owner of each array; returns the arrays."""
        layers, optimizers = self._parts()
        with describable(self._model):
            layout = compat_keras.saved_layout(self._model, optimizers, scratch.make_folder)
        known = {id(o): o for o in (*layers, *optimizers)}
        is_known = layout.fixed and all(identity in known for _, identity in layout.owners)
        # without owners the layout is computed for each checkpoint
        self._owners = [(path, known[identity]) for path, identity in layout.owners] if is_known else None
        self._order = list(layout.regions)
        self._kinds = [(layout.values[path].shape, layout.values[path].dtype) for path in self._order]
        self._template = FileTemplate(layout.size, layout.texts, [layout.regions[path] for path in self._order])
        self._members: dict[str, bytes | FileTemplate] = {**layout.members, _WEIGHTS: self._template}
        self._config, self._metadata = layout.members[_CONFIG], json.loads(layout.members[_METADATA])
        self._made_of, self._made_with = _ids(layers, optimizers), _configured(layers, optimizers)
        return [layout.values[path] for path in self._order]

    def _values(self) -> list[np.ndarray] | None:
        """Returns the arrays in the order of the template; None if they differ in number, shape or dtype from it."""
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
        """Returns (layers, optimizers) of the model, including nested ones."""
        optimizers = list(model_optimizers.optimizers_of(self._model).values())
        inner = [optimizer.inner_optimizer for optimizer in optimizers if hasattr(optimizer, "inner_optimizer")]
        return keras_objects.layers_of(self._model), optimizers + inner

    def _described(self) -> bytes:
        with describable(self._model):
            return compat_keras.config_and_metadata(self._model)[0].encode()

    def _dated(self) -> bytes:
        return json.dumps(
            {**self._metadata, "date_saved": datetime.datetime.now().strftime("%Y-%m-%d@%H:%M:%S")}
        ).encode()


def _ids(layers: list, optimizers: list) -> list[int]:
    """Returns ids of the model's parts, to detect that they were replaced."""
    return [*map(id, layers), *map(id, optimizers)]


def _configured(layers: list, optimizers: list) -> tuple[list, list]:
    """Returns the values of config.json that change in a training: which layers are trainable, and learning rates."""
    rates = [keras_objects.rate_of(optimizer) for optimizer in optimizers]
    numbers = [None if rate is None or callable(rate) else float(compat_keras.as_array(rate)) for rate in rates]
    return [layer.trainable for layer in layers], numbers


@contextlib.contextmanager
def describable(model):
    """Makes a model without `get_config`, such as a GAN that is given its parts, saveable: without a config."""
    try:
        model.get_config()
    except NotImplementedError:
        vars(model)["get_config"] = dict
    try:
        yield
    finally:
        vars(model).pop("get_config", None)
