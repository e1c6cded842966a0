"""KerasHub's backbones travel to workers and train there as in one process; they need `pip install keras-hub`."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from tests.unit.test_transport_shapes import assert_same, round_trip

pytest.importorskip("keras_hub", reason="keras-hub is not installed")
pytestmark = pytest.mark.slow

_TOKENS = {"vocabulary_size": 20, "num_layers": 2, "intermediate_dim": 8, "hidden_dim": 8}
_HEADS = {**_TOKENS, "num_heads": 2}
_GROUPED = {**_TOKENS, "num_query_heads": 2, "num_key_value_heads": 1}
_IMAGE = {"image_shape": (32, 32, 3)}
# Small variants of backbones with different layers: attention, mixture of experts, recurrence, convolution.
BACKBONES = {
    "AlbertBackbone": {**_HEADS, "embedding_dim": 4},
    "BartBackbone": _HEADS,
    "BertBackbone": _HEADS,
    "BloomBackbone": _HEADS,
    "DebertaV3Backbone": _HEADS,
    "DistilBertBackbone": _HEADS,
    "FNetBackbone": _TOKENS,
    "GPT2Backbone": _HEADS,
    "GemmaBackbone": {**_GROUPED, "head_dim": 4},
    "LlamaBackbone": _GROUPED,
    "MixtralBackbone": {**_GROUPED, "num_experts": 2, "top_k": 1},
    "RobertaBackbone": _HEADS,
    "T5Backbone": _HEADS,
    "XLNetBackbone": _HEADS,
    "WhisperBackbone": {**_HEADS, "max_encoder_sequence_length": 24, "max_decoder_sequence_length": 6},
    "RWKV7Backbone": {
        "vocabulary_size": 20,
        "num_layers": 2,
        "head_size": 4,
        "hidden_size": 8,
        "intermediate_dim": 8,
        "gate_lora": 4,
        "mv_lora": 4,
        "aaa_lora": 4,
        "decay_lora": 4,
    },
    "DenseNetBackbone": {**_IMAGE, "stackwise_num_repeats": [1, 1], "growth_rate": 4},
    "ResNetBackbone": {
        **_IMAGE,
        "input_conv_filters": [64],
        "input_conv_kernel_sizes": [7],
        "stackwise_num_filters": [64, 64],
        "stackwise_num_blocks": [1, 1],
        "stackwise_num_strides": [1, 2],
        "block_type": "basic_block",
    },
    "VGGBackbone": {**_IMAGE, "stackwise_num_repeats": [1, 1], "stackwise_num_filters": [4, 4]},
    "ViTBackbone": {**_IMAGE, "patch_size": 8, "num_layers": 2, "num_heads": 2, "hidden_dim": 8, "mlp_dim": 8},
}


@pytest.fixture(autouse=True)
def gone():
    yield
    import keras

    keras.backend.clear_session()
    gc.collect()


def _inputs(model, rows: int = 1):
    """Returns rows for every input of a model: 6 tokens, 24 frames of sound, or an image."""
    generator = np.random.default_rng(0)

    def values(tensor):
        shape = (rows, *(size or 6 for size in tensor.shape[1:]))
        if tensor.name.endswith("features"):
            shape = (rows, 24, *shape[2:])
        if "int" in tensor.dtype:
            mask = "mask" in tensor.name
            return np.ones(shape, "int32") if mask else generator.integers(0, 2, shape).astype("int32")
        return generator.uniform(size=shape).astype("float32")

    if isinstance(model.input, dict):
        return {name: values(tensor) for name, tensor in model.input.items()}
    return values(model.input)


@pytest.mark.parametrize("name", sorted(BACKBONES))
def test_backbone_travels(name):
    import keras_hub

    model = getattr(keras_hub.models, name)(**BACKBONES[name])
    x = _inputs(model)
    expected = model(x, training=False)
    model.compile("adam", "mse")
    copy = round_trip(model)
    assert copy.get_config() == model.get_config()
    assert_same(expected, copy(x, training=False))
