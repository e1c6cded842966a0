"""Classify texts: TextVectorization inside the model, adapted to a Ray Dataset, on several Ray workers.

python jobs/text.py --num-workers 2

The texts are made: reviews of a few words, with those that say whether the reviewer was content.
"""

from __future__ import annotations

import argparse
import os

import ray
from ray.train import RunConfig, ScalingConfig

import raytf

GOOD = ["great", "lovely", "warm", "clean", "friendly"]
BAD = ["awful", "cold", "dirty", "rude", "broken"]
OTHER = ["the", "room", "was", "and", "staff", "view", "breakfast", "very", "quite", "bed", "had", "a"]


def write_reviews(folder: str, count: int) -> None:
    """Writes reviews to train/ and validation/, with the label 1 for content reviewers; a fifth validates."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    random = np.random.default_rng(0)
    for name, rows in {"train": count * 4 // 5, "validation": count // 5}.items():
        labels = random.integers(0, 2, rows)
        texts = []
        for label in labels:
            words = [*random.choice(GOOD if label else BAD, 2), *random.choice(OTHER, random.integers(4, 12))]
            texts.append(" ".join(random.permutation(words)))
        os.makedirs(f"{folder}/{name}", exist_ok=True)
        pq.write_table(pa.table({"text": texts, "label": labels}), f"{folder}/{name}/reviews.parquet")


def build_model(config):
    import keras
    from keras import layers

    model = keras.Sequential(
        [
            keras.Input((), dtype="string"),
            layers.TextVectorization(vocabulary=config["words"], output_sequence_length=20),
            layers.Embedding(len(config["words"]) + 2, 16, mask_zero=True),
            layers.GlobalAveragePooling1D(),
            layers.Dense(1, "sigmoid"),
        ]
    )
    model.compile(keras.optimizers.Adam(config["learning_rate"]), "binary_crossentropy", metrics=["accuracy"])
    return model


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=64, help="rows of the global batch")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--learning-rate", type=float, default=1e-2)
    parser.add_argument("--storage", default="runs", help="folder for data and results that all hosts share")
    parser.add_argument("--smoke", action="store_true", help="few rows and an epoch, to see that everything works")
    options = parser.parse_args(arguments)
    import keras

    storage = os.path.abspath(options.storage)
    write_reviews(f"{storage}/reviews", 500 if options.smoke else 10_000)
    datasets = {name: ray.data.read_parquet(f"{storage}/reviews/{name}") for name in ("train", "validation")}
    layer = raytf.adapt(keras.layers.TextVectorization(max_tokens=1000), datasets["train"], "text")
    trainer = raytf.KerasTrainer(
        build_model,
        config={
            "batch_size": options.batch_size,
            "epochs": 1 if options.smoke else options.epochs,
            "learning_rate": options.learning_rate,
            "words": layer.get_vocabulary(include_special_tokens=False),
        },
        datasets=datasets,
        features="text",
        labels="label",
        scaling_config=ScalingConfig(num_workers=options.num_workers),
        run_config=RunConfig(storage_path=storage),
    )
    result = trainer.fit()
    raytf.show_result(result)
    return result


if __name__ == "__main__":
    main()
