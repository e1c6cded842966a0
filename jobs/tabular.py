"""Train on CSV files with preprocessing layers inside the model, on several Ray workers.

python jobs/tabular.py --num-workers 2

The rows are made: flats with a city, a size and a text, and whether they were let within a week.
"""

from __future__ import annotations

import argparse
import csv
import os

from ray.train import RunConfig, ScalingConfig

import raytf

CITIES = ["Bern", "Oslo", "Rome", "Wien", "Zug"]
WORDS = ["bright", "quiet", "old", "new", "garden", "loud", "balcony"]


def write_rows(folder: str, rows: int) -> None:
    """Writes CSV files below train/ and validation/."""
    import numpy as np

    random = np.random.default_rng(0)
    for name, parts in {"train": 4, "validation": 1}.items():
        os.makedirs(f"{folder}/{name}", exist_ok=True)
        for part in range(parts):
            with open(f"{folder}/{name}/{part}.csv", "w", newline="") as file:
                writer = csv.writer(file)
                writer.writerow(["city", "size", "text", "let"])
                for _ in range(rows // 5):
                    city, size = random.integers(len(CITIES)), random.normal(80, 25)
                    words = random.choice(WORDS, 3, replace=False)
                    score = (size - 80) / 25 + city - 2 + 2 * ("quiet" in words) - 2 * ("loud" in words)
                    writer.writerow([CITIES[city], f"{size:.1f}", " ".join(words), int(score > 0)])


def adapted(rows) -> dict:
    """What the layers of the model need to know of the data; it may be larger than memory."""
    import keras

    size = raytf.adapt(keras.layers.Normalization(), rows, "size")
    return {
        "cities": raytf.adapt(keras.layers.StringLookup(), rows, "city").get_vocabulary(),
        "words": raytf.adapt(keras.layers.TextVectorization(), rows, "text").get_vocabulary(),
        "mean": float(size.mean[0, 0]),
        "variance": float(size.variance[0, 0]),
    }


def build_model(config):
    import keras
    from keras import layers

    city = keras.Input((1,), name="city", dtype="string")
    text = keras.Input((1,), name="text", dtype="string")
    size = keras.Input((1,), name="size")
    numbers = layers.StringLookup(vocabulary=config["cities"], output_mode="one_hot")(city)
    words = layers.TextVectorization(vocabulary=config["words"], output_sequence_length=3)(text)
    words = layers.GlobalAveragePooling1D()(layers.Embedding(len(config["words"]), 8)(words))
    scaled = layers.Normalization(mean=config["mean"], variance=config["variance"])(size)
    x = layers.Dense(16, "relu")(layers.Concatenate()([numbers, words, scaled]))
    model = keras.Model({"city": city, "text": text, "size": size}, layers.Dense(1, "sigmoid")(x))
    model.compile(keras.optimizers.Adam(config["learning_rate"]), "binary_crossentropy", metrics=["accuracy"])
    return model


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=100, help="rows of the global batch")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--learning-rate", type=float, default=1e-2)
    parser.add_argument("--storage", default="runs", help="folder for data and results that all hosts share")
    parser.add_argument("--smoke", action="store_true", help="few rows and an epoch, to see that everything works")
    options = parser.parse_args(arguments)
    import ray

    storage = os.path.abspath(options.storage)
    write_rows(f"{storage}/flats", 500 if options.smoke else 20_000)
    datasets = {name: ray.data.read_csv(f"{storage}/flats/{name}") for name in ("train", "validation")}
    trainer = raytf.KerasTrainer(
        build_model,
        config={
            "batch_size": options.batch_size,
            "epochs": 1 if options.smoke else options.epochs,
            "learning_rate": options.learning_rate,
            **adapted(datasets["train"]),
        },
        datasets=datasets,
        features={"city": "city", "text": "text", "size": "size"},
        labels="let",
        scaling_config=ScalingConfig(num_workers=options.num_workers),
        run_config=RunConfig(storage_path=storage),
    )
    result = trainer.fit()
    raytf.show_result(result)
    return result


if __name__ == "__main__":
    main()
