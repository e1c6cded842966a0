"""Train a recommender with large tables, of which a step updates the rows that its batch uses, on several workers.

python jobs/large_embedding.py --num-workers 2

The rows are made: users rate items, by a taste that some of them share.
"""

from __future__ import annotations

import argparse
import os

import ray
from ray.train import RunConfig, ScalingConfig

import raytf


def ratings(rows: int, users: int, items: int) -> ray.data.Dataset:
    """Returns who likes what: users and items whose ids have the same remainder by 7 go together."""
    import numpy as np
    import pandas as pd

    random = np.random.default_rng(0)
    user, item = random.integers(0, users, rows), random.integers(0, items, rows)
    return ray.data.from_pandas(pd.DataFrame({"user": user, "item": item, "likes": (user % 7 == item % 7) * 1}))


def build_model(config):
    import keras
    from keras import layers

    user, item = (keras.Input((), dtype="int64", name=name) for name in ("user", "item"))
    vectors = [
        layers.Embedding(config["users"], config["width"])(user),
        layers.Embedding(config["items"], config["width"])(item),
    ]
    hidden = layers.Dense(32, "relu")(layers.Concatenate()(vectors))
    model = keras.Model({"user": user, "item": item}, layers.Dense(1, "sigmoid")(hidden))
    model.compile(keras.optimizers.Adam(config["learning_rate"]), "binary_crossentropy", metrics=["AUC"])
    return model


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=1024, help="rows of the global batch")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--learning-rate", type=float, default=1e-2)
    parser.add_argument("--users", type=int, default=1_000_000, help="rows of the larger table")
    parser.add_argument("--width", type=int, default=16, help="of both tables")
    parser.add_argument("--storage", default="runs", help="folder for results that all hosts share")
    parser.add_argument("--smoke", action="store_true", help="small tables and an epoch, to see that everything works")
    options = parser.parse_args(arguments)
    users = 1000 if options.smoke else options.users
    trainer = raytf.KerasTrainer(
        build_model,
        config={
            "batch_size": options.batch_size,
            "epochs": 1 if options.smoke else options.epochs,
            "learning_rate": options.learning_rate,
            "users": users,
            "items": users // 10,
            "width": options.width,
        },
        datasets={"train": ratings(20 * users, users, users // 10)},
        features={"user": "user", "item": "item"},
        labels="likes",
        scaling_config=ScalingConfig(num_workers=options.num_workers),
        run_config=RunConfig(storage_path=os.path.abspath(options.storage)),
        tensorflow_config=raytf.TensorflowConfig(sparse_updates="lazy"),
    )
    result = trainer.fit()
    raytf.show_result(result)
    return result


if __name__ == "__main__":
    main()
