"""Seconds from a call of `raytf.fit` to the end of its first step: the first call, the next ones, and `model.fit`.

python jobs/benchmarks/fit.py                 # two workers on this machine, a model of 0.1 M parameters, 10,000 rows
"""

from __future__ import annotations

import sys
import time

import common

ROWS, WIDTH, BATCH = 10_000, 32, 250


def once(way: str, calls: str) -> None:
    """Seconds to the first step of several calls one after the other, in a process of its own."""
    import keras
    import numpy as np

    import raytf

    class FirstStep(keras.callbacks.Callback):
        raytf_local_batches = True
        at = None

        def on_train_batch_end(self, batch, logs=None):
            self.at = self.at or time.time()

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(ROWS, WIDTH)).astype("float32"), rng.integers(0, 10, ROWS)
    layers = [keras.Input((WIDTH,)), keras.layers.Dense(256, "relu"), keras.layers.Dense(256, "relu")]
    model = keras.Sequential([*layers, keras.layers.Dense(10, "softmax")])
    model.compile("adam", "sparse_categorical_crossentropy", steps_per_execution=1)
    fit = model.fit if way == "model.fit" else lambda *args, **kw: raytf.fit(model, *args, num_workers=2, **kw)
    found = []
    for _ in range(int(calls)):
        step = FirstStep()  # comes back from the workers with what it saw there, on this machine's clock
        began = time.time()
        fit(x, y, batch_size=BATCH, epochs=1, verbose=0, callbacks=[step])
        found.append(step.at - began)
    common.give(found)


def main(arguments=None):
    options = common.parser(__doc__).parse_args(arguments)
    repeats = 1 if options.smoke else options.repeats
    ways = ("raytf.fit", "model.fit")
    found = {way: [] for way in ways}
    for way in ways:
        found[way] = common.measure(__file__, "--once", way, str(1 + repeats))
    rows = []
    for way, (first, *others) in found.items():
        median, least, most = common.spread(others)
        rows.append([way, first, median, f"{least:.2g} to {most:.2g}"])
    head = ["", "first call, s", f"next calls, s (median of {repeats})", "spread"]
    shown = common.table("raytf.fit: from the call to the end of its first step, two workers", head, rows)
    common.finish(options, "fit", shown, found)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--once"]:
        once(*sys.argv[2:4])
    else:
        main()
