"""Train a CNN on handwritten digits on several Ray workers.

python jobs/digits.py --num-workers 2
ray job submit --working-dir . -- python jobs/digits.py --num-workers 2 --storage /shared/runs

The images are digits.csv.gz: 1797 scans of 8x8 pixels (E. Alpaydin, C. Kaynak, 1998, UCI, CC BY 4.0).
"""

from __future__ import annotations

import argparse
import logging
import os

import ray
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig

import raytf

DIGITS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "digits.csv.gz")


def build_model(config):
    import keras
    from keras import layers

    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Rescaling(1 / 16),
            layers.Conv2D(16, 3, padding="same", activation="relu"),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Dropout(0.3),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(
        keras.optimizers.Adam(config["learning_rate"]), "sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    return model


def write_parquet(folder: str) -> None:
    """Writes the digits to train/ and validation/ below `folder`, a path or URI: a fifth of the rows validate."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq
    from pyarrow import fs

    filesystem, root = fs.FileSystem.from_uri(folder)
    if filesystem.get_file_info(f"{root}/validation/digits.parquet").is_file:
        return  # a run that resumes reads the same files; these are written last
    pixels, labels = np.split(np.loadtxt(DIGITS, delimiter=","), [64], axis=1)
    images = pixels.reshape(-1, 8, 8, 1).astype("float32")
    order = np.random.default_rng(0).permutation(len(images))
    cut = len(images) // 5
    for name, rows in {"train": order[cut:], "validation": order[:cut]}.items():
        filesystem.create_dir(f"{root}/{name}")
        image = pa.FixedShapeTensorArray.from_numpy_ndarray(np.ascontiguousarray(images[rows]))
        label = pa.array(labels[rows, 0].astype("int64"))
        pq.write_table(
            pa.table({"image": image, "label": label}), f"{root}/{name}/digits.parquet", filesystem=filesystem
        )


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--cpus-per-worker", type=float, default=1, help="CPUs that Ray reserves for each worker")
    parser.add_argument("--batch-size", type=int, default=128, help="rows of the global batch")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument(
        "--storage", default="runs", help="folder or URI for data and results; one that all hosts of a cluster share"
    )
    parser.add_argument("--name", help="of the run; the same command resumes it")
    parser.add_argument("--max-failures", type=int, default=0, help="restarts after a worker was lost")
    parser.add_argument("--smoke", action="store_true", help="one epoch, to see that everything works")
    options = parser.parse_args(arguments)
    storage = options.storage if "://" in options.storage else os.path.abspath(options.storage)

    ray.init(logging_level=logging.ERROR, log_to_driver=False, include_dashboard=False)
    data = f"{storage}/digits-data"
    write_parquet(data)
    trainer = raytf.KerasTrainer(
        build_model,
        config={
            "batch_size": options.batch_size,
            "epochs": 1 if options.smoke else options.epochs,
            "learning_rate": options.learning_rate,
        },
        datasets={name: ray.data.read_parquet(f"{data}/{name}") for name in ("train", "validation")},
        features="image",
        labels="label",
        scaling_config=ScalingConfig(
            num_workers=options.num_workers, resources_per_worker={"CPU": options.cpus_per_worker}
        ),
        run_config=RunConfig(
            name=options.name,
            storage_path=storage,
            checkpoint_config=CheckpointConfig(num_to_keep=2),
            failure_config=FailureConfig(max_failures=options.max_failures),
        ),
    )
    result = trainer.fit()
    raytf.show_result(result)
    return result


if __name__ == "__main__":
    main()
