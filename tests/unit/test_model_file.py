"""A model's file put together from an image and arrays is what Keras would have written. No Ray."""

import io
import json
import warnings
import zipfile

import h5py
import numpy as np
import pytest

from raytf.storage import gather_io
from raytf.storage.file_template import FileTemplate, ZipTemplate
from raytf.worker.model_file import ModelFile
from tests.unit import kinds_of_models


def written(archive: ZipTemplate) -> dict[str, bytes]:
    """The members of an archive as they would be in its file."""
    for (_, size), value in zip(archive.template.regions, archive.values, strict=True):
        assert value.nbytes == size
    image = b"".join(map(bytes, archive.template.pieces(archive.values)))
    assert len(image) == archive.template.size
    members = [(name, image if isinstance(c, FileTemplate) else c) for name, c in archive.members]
    content = b"".join(gather_io.zip_pieces(members))
    with zipfile.ZipFile(io.BytesIO(content)) as file:
        assert file.testzip() is None
        return {name: file.read(name) for name in file.namelist()}


def by_keras(model, folder) -> dict[str, bytes]:
    from raytf.worker.model_file import describable

    path = str(folder / "by_keras.keras")
    with describable(model):
        model.save(path)
    with zipfile.ZipFile(path) as file:
        return {name: file.read(name) for name in file.namelist()}


def arrays(content: bytes) -> dict:
    found = {}

    def look(path, member):
        attributes = {k: str(v) for k, v in member.attrs.items()}
        is_array = isinstance(member, h5py.Dataset)
        found[path] = (attributes, (str(member.dtype), member.shape, member[()].tobytes()) if is_array else None)

    with h5py.File(io.BytesIO(content), "r") as file:
        file.visititems(look)
    return found


def assert_same(left: dict[str, bytes], right: dict[str, bytes]) -> None:
    assert list(left) == list(right)
    for name in right:
        if name == "model.weights.h5":
            assert arrays(left[name]) == arrays(right[name])
        elif name == "metadata.json":
            assert json.loads(left[name])["keras_version"] == json.loads(right[name])["keras_version"]
        else:
            assert left[name] == right[name], name


def build(model) -> None:
    import keras

    if not model.built:
        model(keras.ops.zeros((2, 3)))
    for optimizer in vars(model).values():
        if isinstance(optimizer, keras.Optimizer) and not optimizer.built:
            optimizer.build(model.trainable_variables)


def disturb(model, seed: int) -> None:
    """Gives every number of a model and its optimizers another value, as training would."""
    import keras

    from raytf.parallel import model_optimizers

    rng = np.random.default_rng(seed)
    for variable in [*model.variables, *model_optimizers.variables(model)]:
        if variable.dtype != "string":
            variable.assign(keras.ops.cast(rng.integers(0, 100, variable.shape), variable.dtype))


def shared():
    import keras

    layer, inputs = keras.layers.Dense(3), keras.Input((3,))
    model = keras.Model(inputs, keras.layers.Dense(1)(layer(layer(inputs))))
    model.compile(keras.optimizers.Adam(0.1, use_ema=True, gradient_accumulation_steps=2), "mse")
    return model


def rnn_of_cells():
    import keras

    cells = [keras.layers.GRUCell(3), keras.layers.LSTMCell(2)]
    model = keras.Sequential([keras.Input((4, 3)), keras.layers.RNN(cells), keras.layers.Dense(1)])
    model.compile("ftrl", "mse")
    return model


def preprocessing(mode="tf_idf"):
    import keras

    normal = keras.layers.Normalization()
    normal.adapt(np.random.default_rng(0).normal(size=(20, 3)))
    words = keras.layers.TextVectorization(output_mode=mode, split="whitespace")
    words.adapt(["a b c", "b c", "ü d"])
    a, b = keras.Input((3,)), keras.Input((1,), dtype="string")
    model = keras.Model(
        [a, b], keras.layers.Dense(1)(keras.layers.concatenate([normal(a), keras.layers.Flatten()(words(b))]))
    )
    model.compile("nadam", "mse")
    return model


def words():
    return preprocessing("multi_hot")  # Keras 3.12 cannot load the other


def bfloat16():
    import keras

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, dtype="bfloat16"), keras.layers.Dense(1)])
    model.compile("lion", "mse")
    return model


def gan():
    import keras

    class Gan(keras.Model):
        """Takes its parts, and has two optimizers, no call and no get_config."""

        def __init__(self, parts):
            super().__init__()
            self.generator, self.critic = parts
            self.first, self.second = keras.optimizers.Adam(0.1), keras.optimizers.RMSprop(0.1)
            self.first.build(self.generator.trainable_variables)
            self.second.build(self.critic.trainable_variables)
            self.built = True

        def get_config(self):
            raise NotImplementedError

    parts = [keras.Sequential([keras.Input((2,)), keras.layers.Dense(2), keras.layers.Dropout(0.5)]) for _ in "ab"]
    model = Gan(parts)
    model.compile()
    return model


def own_variables():
    import keras

    @keras.saving.register_keras_serializable("tests")
    class Doubled(keras.layers.Layer):
        """Writes a value that is made for the file."""

        def build(self, shape):
            self.scale = self.add_weight(shape=(shape[-1],), name="scale")

        def call(self, x):
            return x * self.scale

        def save_own_variables(self, store):
            store["twice"] = np.asarray(self.scale) * 2

        def load_own_variables(self, store):
            self.scale.assign(store["twice"] / 2)

    model = keras.Sequential([keras.Input((3,)), Doubled(), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    return model


# Keras itself cannot save the losses of one of them, and the schedule of another.
UNSAVED = (kinds_of_models.own_losses, kinds_of_models.schedule)
OF_OTHERS = [kind for kind in kinds_of_models.KINDS if kind not in UNSAVED]
KINDS = (*OF_OTHERS, shared, rnn_of_cells, preprocessing, bfloat16, gan, own_variables)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_the_file_is_what_keras_writes_without_keras_writing_it(tmp_path, kind, monkeypatch):
    model = kind()
    build(model)
    file = ModelFile(model)
    monkeypatch.setattr(ModelFile, "_lay_out", None)  # one layout is enough
    for seed in (1, 2):
        disturb(model, seed)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = written(file.content())
        assert_same(found, by_keras(model, tmp_path))


@pytest.mark.parametrize("kind", [shared, words, own_variables], ids=lambda kind: kind.__name__)
def test_keras_alone_loads_it_with_its_optimizer(tmp_path, kind):
    import keras

    model = kind()
    build(model)
    file = ModelFile(model)
    disturb(model, 3)
    path = tmp_path / "model.keras"
    path.write_bytes(b"".join(gather_io.zip_pieces(written(file.content()).items())))
    loaded = keras.saving.load_model(path)
    for left, right in zip(model.variables, loaded.variables, strict=True):
        np.testing.assert_array_equal(left, right)
    for left, right in zip(model.optimizer.variables, loaded.optimizer.variables, strict=True):
        np.testing.assert_array_equal(left, right)


def test_what_a_training_changes_of_the_config_is_in_it(tmp_path):
    model = kinds_of_models.functional()
    build(model)
    file = ModelFile(model)
    model.optimizer.learning_rate = 0.25
    model.layers[2].trainable = False
    found = written(file.content())
    assert json.loads(found["config.json"])["compile_config"]["optimizer"]["config"]["learning_rate"] == 0.25
    assert_same(found, by_keras(model, tmp_path))


def test_a_model_that_got_other_parts_is_laid_out_once_more(tmp_path):
    import keras

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4)])
    model.compile("adam", "mse")
    build(model)
    file = ModelFile(model)
    model.add(keras.layers.Dense(2))
    assert_same(written(file.content()), by_keras(model, tmp_path))
    model.optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    model.optimizer.build(model.trainable_variables)
    assert_same(written(file.content()), by_keras(model, tmp_path))


def test_an_array_that_grows_is_laid_out_each_time(tmp_path):
    import keras

    class Counted(keras.layers.Layer):
        """Writes as many numbers as it was given."""

        def call(self, x):
            return x

        def save_own_variables(self, store):
            store["counted"] = np.arange(self.count)

    layer = Counted()
    model = keras.Sequential([keras.Input((3,)), layer, keras.layers.Dense(1)])
    model.compile("adam", "mse")
    layer.count = 1
    file = ModelFile(model)
    for layer.count in (1, 2, 3, 4):
        assert_same(written(file.content()), by_keras(model, tmp_path))
