"""What AutoGraph generates is in memory alone: no file is made, so that no killed process leaves one. No Ray."""

import inspect
import linecache
import tempfile
import traceback

import pytest
import tensorflow as tf

from raytf.compat import autograph


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def _some(x):
    if x > 0:
        x = x * 2
    return x


def _another(x):
    return x + 1


def _inner(x):
    raise ValueError("broken on purpose")


def _outer(x):
    return _inner(x) if x.shape.rank == 0 else x


def converted():
    """A function that AutoGraph has converted, another one at each call."""
    return tf.autograph.to_graph(lambda x: _some(x), recursive=True)  # a lambda is converted again


def test_no_file_is_made(temporary):
    with autograph.in_memory(), autograph.in_memory():
        function = converted()
        assert int(function(tf.constant(3))) == 6
        assert list(tf.function(_outer)(tf.constant([-1]))) == [-1]
        assert not list(temporary.iterdir())
        assert "ag__.converted_call(_some" in inspect.getsource(function)
        before = len(linecache.cache)
    assert len(linecache.cache) < before and not [name for name in linecache.cache if name.startswith("<raytf>")]
    assert int(function(tf.constant(-3))) == -3, "it is still there"
    tf.autograph.to_graph(_another)(tf.constant(1))
    assert list(temporary.iterdir()), "without, TensorFlow makes one"


def test_errors_are_reported_with_the_users_lines(temporary):
    with autograph.in_memory(), pytest.raises(ValueError, match="broken on purpose") as raised:
        tf.function(_outer).get_concrete_function(tf.TensorSpec((), tf.int32))
    assert __file__ in str(raised.value) and 'raise ValueError("broken on purpose")' in str(raised.value)
    with autograph.in_memory():
        try:
            tf.autograph.to_graph(_inner)(1)
        except ValueError:
            text = traceback.format_exc()
    assert "<raytf>/__autograph_generated_file" in text and "ag__.converted_call(ag__.ld(ValueError)" in text
