"""Sources of models with a place (@) that differs; `python changes_of_models.py` prints what each is, from anywhere."""

from __future__ import annotations

HEAD = """
import functools, io, random, threading, time, types
import keras, numpy as np, tensorflow as tf
D = keras.layers.Dense
def done(model, loss="mse", rate=0.01, **more):
    model.compile(keras.optimizers.Adam(rate), loss, **more)
    return model
def seq(*layers):
    return keras.Sequential([keras.Input((2,)), *layers])
def square(y, p):
    return keras.ops.mean((y - p) ** 2, -1)
class Layer(keras.layers.Layer):
    def call(self, x):
        return x
"""


def loss(body: str, before: str = "") -> str:
    """A model whose loss is made in build."""
    inner = "".join(f"    {line}\n" for line in before.splitlines())
    return f"def build():\n{inner}    def loss(y, p): return {body}\n    return done(seq(D(1)), loss)"


# name: (source, one, other, how the difference is named)
SEEN = {
    "closure over a dict": (loss("square(y, p) * c['a']", "c = {'a': @}"), "1.0", "9.0", "loss c a 9, was 1"),
    "closure over a list": (loss("square(y, p) * c[0]", "c = [@, 1]"), "1.0", "9.0", "loss c 9, was 1"),
    "closure over an array": (
        loss("square(y, p) * c.mean()", "c = np.full(40, @)"),
        "1.0",
        "9.0",
        "other values of loss c",
    ),
    "closure over a function": (
        loss("f(square(y, p))", "f = lambda e: e * @"),
        "1.0",
        "9.0",
        "another code of loss f",
    ),
    "closure over an object": (
        "class A:\n    def __init__(self, k): self.k = k\n" + loss("square(y, p) * c.k", "c = A(@)"),
        "1.0",
        "9.0",
        "loss c k 9, was 1",
    ),
    "default of a loss": (
        "def loss(y, p, k=@): return square(y, p) * k\ndef build(): return done(seq(D(1)), loss)",
        "1.0",
        "9.0",
        "loss k 9, was 1",
    ),
    "constant of the module": ("K = @\n" + loss("square(y, p) * K"), "1.0", "9.0", "loss K 9, was 1"),
    "helper of the module": (
        "def g(e): return @\ndef helper(e): return g(e)\n" + loss("helper(square(y, p))"),
        "e * 2",
        "e + 2",
        "another code of loss helper g",
    ),
    "class of the module": (
        "class A:\n    K = @\n" + loss("square(y, p) * A.K"),
        "1.0",
        "9.0",
        "loss A K 9, was 1",
    ),
    "nested constant": (loss("square(y, p) * {(1, (@,)): 2.0}.get(1, 3.0)"), "4", "5", "another code of loss"),
    "decorator": (
        "def times(k):\n    def wrap(f):\n        @functools.wraps(f)\n        def inner(y, p): return k * f(y, p)\n"
        "        return inner\n    return wrap\ndef build(): return done(seq(D(1)), times(~)(square))",
        "2.0",
        "3.0",
        "loss k 3, was 2",
    ),
    "partial": (
        "def loss(y, p, k): return square(y, p) * k\ndef build(): return done(seq(D(1)), functools.partial(loss, k=@))",
        "1.0",
        "9.0",
        "loss k 9, was 1",
    ),
    "bound method": (
        "class A:\n    def __init__(self, k): self.k = k\n    def loss(self, y, p): return square(y, p) * self.k\n"
        "def build(): return done(seq(D(1)), A(@).loss)",
        "1.0",
        "9.0",
        "loss self k 9, was 1",
    ),
    "callable object": (
        "class A:\n    def __init__(self, k): self.k = k\n    def __call__(self, y, p): return square(y, p) * self.k\n"
        "def build(): return done(seq(D(1)), A(@))",
        "1.0",
        "9.0",
        "loss k 9, was 1",
    ),
    "own Loss": (
        "class Ls(keras.losses.Loss):\n    def __init__(self, k): super().__init__(); self.k = k\n"
        "    def call(self, y, p): return self.k * square(y, p)\ndef build(): return done(seq(D(1)), Ls(@))",
        "1.0",
        "5.0",
        "loss k 5, was 1",
    ),
    "own metric": (
        "def far(y, p): return keras.ops.abs(y - p) * @\ndef build(): return done(seq(D(1)), metrics=[far])",
        "1.0",
        "5.0",
        "another code of metrics",
    ),
    "wrapped metric": (
        "def far(y, p): return keras.ops.abs(y - p) * @\n"
        "def build(): return done(seq(D(1)), metrics=[keras.metrics.MeanMetricWrapper(far, name='m')])",
        "1.0",
        "5.0",
        "another code of metrics fn",
    ),
    "activation by name": (
        "def act(x): return x * @\ndef build(): return done(seq(D(4, activation=act), D(1)))",
        "1.0",
        "5.0",
        "another code of Dense (layer 1) activation",
    ),
    "activation called as Keras' own": (
        "def relu(x): return x * @\ndef build(): return done(seq(D(4, activation=relu), D(1)))",
        "1.0",
        "5.0",
        "another code of Dense (layer 1) activation",
    ),
    "lambda activation": (
        "def build(): return done(seq(D(4, activation=lambda x: x * @), D(1)))",
        "0.5",
        "0.25",
        "another code of Dense (layer 1) activation",
    ),
    "activation of an LSTM": (
        "def act(x): return x * @\n"
        "def build(): return done(seq(keras.layers.Reshape((2, 1)), keras.layers.LSTM(2, activation=act), D(1)))",
        "1.0",
        "5.0",
        "another code of LSTMCell (layer 3) activation",
    ),
    "regularizer": (
        "def reg(w): return @ * keras.ops.sum(w * w)\ndef build(): return done(seq(D(1, kernel_regularizer=reg)))",
        "0.1",
        "0.2",
        "another code of Dense (layer 1) kernel_regularizer",
    ),
    "own regularizer without config": (
        "class R(keras.regularizers.Regularizer):\n    def __init__(self, k): self.k = k\n"
        "    def __call__(self, w): return self.k * keras.ops.sum(w * w)\n"
        "def build(): return done(seq(D(1, kernel_regularizer=R(@))))",
        "0.1",
        "0.2",
        "Dense (layer 1) kernel_regularizer k 0.2, was 0.1",
    ),
    "Lambda": (
        "def build(): return done(seq(keras.layers.Lambda(lambda x: x * @), D(1)))",
        "2.0",
        "3.0",
        "another code of Lambda (layer 1) function",
    ),
    "Lambda of a function": (
        "def g(x): return x * @\ndef build(): return done(seq(keras.layers.Lambda(g), D(1)))",
        "2.0",
        "3.0",
        "another code of Lambda (layer 1) function",
    ),
    "closure of a Lambda": (
        "def build():\n    k = @\n    return done(seq(keras.layers.Lambda(lambda x: x * k), D(1)))",
        "2.0",
        "3.0",
        "Lambda (layer 1) function k 3, was 2",
    ),
    "default of a Lambda": (
        "def build(): return done(seq(keras.layers.Lambda(lambda x, k=@: x * k), D(1)))",
        "2.0",
        "3.0",
        "Lambda (layer 1) function k 3, was 2",
    ),
    "attribute of a class": (
        "class L(Layer):\n    K = @\n    def call(self, x): return x * self.K\n"
        "def build(): return done(seq(L(), D(1)))",
        "1.0",
        "3.0",
        "L (layer 1) K 3, was 1",
    ),
    "constant that a method reads": (
        "K = @\nclass L(Layer):\n    def call(self, x): return x * K\ndef build(): return done(seq(L(), D(1)))",
        "1.0",
        "3.0",
        "L (layer 1) K 3, was 1",
    ),
    "property": (
        "class L(Layer):\n    @property\n    def k(self): return ~\n    def call(self, x): return x * self.k\n"
        "def build(): return done(seq(L(), D(1)))",
        "1.0",
        "3.0",
        "another code of L (layer 1)",
    ),
    "base class": (
        "class A(Layer):\n    @staticmethod\n    def f(x): return x * ~\nclass L(A):\n"
        "    def call(self, x): return self.f(x)\ndef build(): return done(seq(L(), D(1)))",
        "1.0",
        "3.0",
        "another code of L (layer 1)",
    ),
    "argument that is a dict": (
        "class L(Layer):\n    def __init__(self, config): super().__init__(); self.k = config['k']\n"
        "def build(): return done(seq(L({'k': @}), D(1)))",
        "1.0",
        "3.0",
        "L (layer 1) k 3, was 1",
    ),
    "get_config without an argument": (
        "class L(Layer):\n    def __init__(self, k=1, **kw): super().__init__(**kw); self.k = k\n"
        "    def get_config(self): return super().get_config()\ndef build(): return done(seq(L(@), D(1)))",
        "2.0",
        "3.0",
        "L (layer 1) k 3, was 2",
    ),
    "an argument called learning_rate": (
        "class L(Layer):\n    def __init__(self, learning_rate=1): super().__init__(); self.learning_rate=learning_rate"
        "\n"
        "    def get_config(self): return {**super().get_config(), 'learning_rate': self.learning_rate}\n"
        "def build(): return done(seq(L(@), D(1)))",
        "2.0",
        "3.0",
        "L (layer 1) learning_rate 3, was 2",
    ),
    "an argument called as a method": (
        "class L(Layer):\n    def __init__(self, scale=1): super().__init__(); self._by = scale\n"
        "    def scale(self): return self._by\n"
        "    def get_config(self): return {**super().get_config(), 'scale': self._by}\n"
        "def build(): return done(seq(L(@), D(1)))",
        "2.0",
        "3.0",
        "L (layer 1) scale 3, was 2",
    ),
    "tf.function": (
        "@tf.function\ndef f(x): return x * ~\nclass L(Layer):\n    def call(self, x): return f(x)\n"
        "def build(): return done(seq(L(), D(1)))",
        "2.0",
        "3.0",
        "another code of L (layer 1) f",
    ),
    "cached function": (
        "@functools.cache\ndef f(): return ~\n" + loss("square(y, p) * f()"),
        "2.0",
        "3.0",
        "another code of loss f",
    ),
    "object with slots": (
        "class A:\n    __slots__ = ('k',)\n    def __init__(self, k): self.k = k\nO = A(@)\n"
        + loss("square(y, p) * O.k"),
        "2.0",
        "3.0",
        "loss O k 3, was 2",
    ),
    "rate, the seventh digit": (
        "def build(): return done(seq(D(1)), rate=@)",
        "0.1",
        "0.1000001",
        "learning_rate 0.1000001, was 0.1",
    ),
    "offset, the seventh digit": (
        "def build(): return done(seq(keras.layers.Rescaling(1.0, offset=@), D(1)))",
        "1000001.0",
        "1000002.0",
        "Rescaling (layer 1) offset 1000002, was 1000001",
    ),
    "own train_step": (
        "class Net(keras.Model):\n    def __init__(self): super().__init__(); self.d = D(1)\n"
        "    def call(self, x): return self.d(x)\n    def train_step(self, data): return {'loss': @}\n"
        "def build(): return done(Net())",
        "2.0",
        "3.0",
        "another code of Net",
    ),
    "own schedule": (
        "class S(keras.optimizers.schedules.LearningRateSchedule):\n    def __init__(self, k): self.k = k\n"
        "    def __call__(self, step): return self.k * 0.1\ndef build(): return done(seq(D(1)), rate=S(@))",
        "2.0",
        "3.0",
        "learning_rate k 3, was 2",
    ),
    "own optimizer": (
        "class O(keras.optimizers.SGD):\n    K = @\ndef build():\n    model = seq(D(1))\n"
        "    model.compile(O(0.1), 'mse')\n    return model",
        "2.0",
        "3.0",
        "O K 3, was 2",
    ),
    "wiring of a model within": (
        "def build():\n    i = keras.Input((2,))\n    h = D(2)(i)\n"
        "    return done(seq(keras.Model(i, keras.layers.Add()(@)), D(1)))",
        "[h, h]",
        "[i, h]",
        "layers of Functional (layer 1) that are connected in another way",
    ),
    "a tensor of the layer": (
        "class L(Layer):\n    def __init__(self): super().__init__(); self.k = tf.constant([@, 1.0])\n"
        "def build(): return done(seq(L(), D(1)))",
        "2.0",
        "3.0",
        "another code of L (layer 1)",
    ),
}
# name: (source, one, other)
EQUAL = {
    "docstrings and comments": (
        "def loss(y, p):\n    @\n    return square(y, p)\nclass L(Layer):\n    @\n    def call(self, x):\n        @\n"
        "        return x  # @\ndef build():\n    class M(L):\n        @\n    return done(seq(L(), M(), D(1)), loss)",
        "'one'",
        "'other'  # more",
    ),
    "no docstring": (
        "def loss(y, p):\n    @\n    return square(y, p) * 2.5\ndef build(): return done(seq(D(1)), loss)",
        "'one'",
        "pass",
    ),
    "names of layers": ("def build(): return done(seq(D(4, name='@'), D(1)))", "dense_1", "dense_7"),
    "a function's name": ("def @(y, p): return square(y, p)\ndef build(): return done(seq(D(1)), @)", "one", "other"),
    "lines": ("@def build(): return done(seq(D(4, activation=lambda x: x * 0.5), D(1)))", "", "\n\n\n"),
    "generators of random numbers": (
        "class L(Layer):\n    def __init__(self): super().__init__(); self.seeds = keras.random.SeedGenerator(1)\n"
        "def build():\n    layer = L()\n    layer.rng, layer.own = np.random.default_rng(@), random.Random(@)\n"
        "    return done(seq(layer, keras.layers.Dropout(0.1, seed=@), D(1)))",
        "1",
        "2",
    ),
    "what cannot be told": (
        "class L(Layer):\n    def __init__(self):\n        super().__init__()\n        self.lock = threading.Lock()\n"
        "        self.drawn = tf.random.normal((3,))\n        self.variable = tf.Variable(np.random.normal())\n"
        "        self.made, self.key, self.out = time.time(), object(), io.BytesIO()\n"
        "def build(): return done(seq(L(), D(1)))",
        "",
        "",
    ),
    "random frozen weights": (
        "def build(): return done(seq(D(30, trainable=False), keras.layers.BatchNormalization(), D(1)))",
        "",
        "",
    ),
    "one random frozen weight": (
        "def build(): return done(seq(D(1), D(1, trainable=False)))",
        "",
        "",
    ),
    "a counter": (
        "N = 0\nclass L(Layer):\n    def call(self, x):\n        global N\n        N += 1\n        self.calls += 1\n"
        "        return x\ndef build():\n    layer = L()\n    layer.calls = @\n    return done(seq(layer, D(1)))",
        "0",
        "5",
    ),
    "the trainer's own keys": (loss("square(y, p) * c['a']", "c = {'a': 1.0, 'epochs': @}"), "1", "5"),
    "a set": ("S = {'a', 'b', 'c', 'd', 'e'}\n" + loss("square(y, p) * len(S | {'x', 'y', 'z'})"), "", ""),
    "functions that call each other": (
        "def a(n, x): return b(n - 1, x) if n else x\ndef b(n, x): return a(n - 1, x) if n else x\n"
        + loss("a(4, square(y, p))"),
        "",
        "",
    ),
    "itself": (
        "class Net(keras.Model):\n    def __init__(self):\n        super().__init__(); self.d = D(1)\n"
        "        self.me = types.SimpleNamespace(a=self)\n    def call(self, x): return self.d(x)\n"
        "    def own(self, y, p): return square(y, p)\ndef build():\n    net = Net()\n    return done(net, net.own)",
        "",
        "",
    ),
    "a lookup": (
        "def build(): return done(seq(keras.layers.IntegerLookup(vocabulary=list(range(500))), D(1)))",
        "",
        "",
    ),
}


def told(source: str, part: str, name: str = "__main__", file: str = "cell.py"):
    """What a model of a source with `part` in its place is."""
    import json

    import numpy as np
    import tensorflow as tf

    from raytf.identity import fingerprint
    from raytf.worker import fit

    place = "~" if "~" in source else "@"
    space = {"__name__": name}
    exec(compile(HEAD + source.replace(place, part), file, "exec"), space)
    rows = tf.data.Dataset.from_tensor_slices((np.zeros((4, 2), "f4"), np.zeros((4,), "f4"))).batch(2)

    def build():
        model = space["build"]()
        fit.build_from_data(model, rows)
        return model

    return json.loads(json.dumps(fingerprint.model_fingerprint(build())))


if __name__ == "__main__":
    import json

    moved = {
        name: told("\n\n\n" + case[0], case[1], "another_module", "moved.py")
        for name, case in {**SEEN, **EQUAL}.items()
    }
    print(json.dumps(moved))
