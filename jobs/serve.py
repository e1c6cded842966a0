"""Train, evaluate and export a model, and serve the export with Ray Serve. Needs `pip install "ray[serve]"`.

python jobs/serve.py                                    # asks for a few predictions, and ends
python jobs/serve.py --wait                             # serves until Ctrl-C

A request is a JSON list of images: 8 rows of 8 numbers from 0 to 16 each. The answer is the list of their digits.

The images are those of jobs/digits.py.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import urllib.request

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import ray
from ray import serve
from ray.train import RunConfig, ScalingConfig

import raytf
from jobs import digits


def train(storage: str, epochs: int, num_workers: int):
    """Trains the CNN of jobs/digits.py; returns its `ray.train.Result` and the validation data."""
    digits.write_parquet(f"{storage}/digits-data")
    data = {name: ray.data.read_parquet(f"{storage}/digits-data/{name}") for name in ("train", "validation")}
    trainer = raytf.KerasTrainer(
        digits.build_model,
        config={"batch_size": 128, "epochs": epochs, "learning_rate": 2e-3},
        datasets=data,
        features="image",
        labels="label",
        scaling_config=ScalingConfig(num_workers=num_workers),
        run_config=RunConfig(storage_path=storage),
    )
    return trainer.fit(), data["validation"]


@serve.deployment()
class Digits:
    """Answers images, a JSON list, with the most likely digit of each. Needs TensorFlow alone."""

    def __init__(self, folder: str):
        import tensorflow as tf

        self._model = tf.saved_model.load(folder)

    async def __call__(self, request):
        import numpy as np

        images = np.asarray(await request.json(), "float32").reshape(-1, 8, 8, 1)
        return self._model.serve(images).numpy().argmax(1).tolist()


def ask(port: int, images) -> list[int]:
    """Returns the digits that the server finds in images."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}", json.dumps(images.tolist()).encode())
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--storage", default="runs", help="folder for data and results that all hosts share")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--wait", action="store_true", help="serve until Ctrl-C")
    parser.add_argument("--smoke", action="store_true", help="one epoch, to see that everything works")
    options = parser.parse_args(arguments)
    storage = os.path.abspath(options.storage)
    result, held_out = train(storage, 1 if options.smoke else options.epochs, options.num_workers)
    model = raytf.load_model(result.checkpoint.path)
    metrics = raytf.evaluate(
        model,
        held_out,
        features="image",
        labels="label",
        num_workers=options.num_workers,
        return_dict=True,
        verbose=0,
    )
    print(f"accuracy {metrics['accuracy']:.3f}")
    folder = raytf.export(result.checkpoint.path, f"{result.path}/served")
    try:
        serve.start(http_options={"port": options.port})
        serve.run(Digits.bind(folder))  # type: ignore[attr-defined]  # mypy does not follow decorators of classes
        print("serves", folder)
        print("digits", ask(options.port, held_out.take_batch(5)["image"]))
        if options.wait:
            with contextlib.suppress(KeyboardInterrupt):
                signal.pause()
    finally:
        serve.shutdown()  # on a cluster Serve outlives this process
    return result


if __name__ == "__main__":
    main()
