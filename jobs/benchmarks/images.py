"""Images a second, decoded and resized, in batches: raytf's feed, tf.data and WebDataset, on the same JPEG files.

python jobs/benchmarks/images.py            # photos of 1000 x 750 pixels as 224 x 224; every way in turn, medians

"raytf" reads the files by Ray Data, and decodes them in its feed; "raytf, draft" with `Column(draft=True)`, for which
libjpeg leaves out what the smaller image does not show. "tf.data" maps `decode_jpeg` and `resize` over the files.
"tf.data, ratio" decodes at a half by its argument. "WebDataset" reads tar files and decodes by PIL in this process, as
its worker processes are those of PyTorch. LitData needs PyTorch, too, and is left out.
"""

from __future__ import annotations

import io
import pathlib
import sys
import tarfile
import tempfile
import time

import common

SIZE, PHOTO, BATCH = (224, 224, 3), (1000, 750), 32
FILES = 600
WAYS = ("tf.data", "tf.data, ratio", "WebDataset", "raytf", "raytf, draft")


def write(folder: pathlib.Path, count: int) -> None:
    """Photos with soft shapes and some noise, about 100 KB each, as files and in four tar files."""
    import numpy as np
    from PIL import Image

    random = np.random.default_rng(0)
    (folder / "photos").mkdir()
    for i in range(count):
        shapes = Image.fromarray(random.integers(0, 255, (24, 32, 3), dtype="uint8")).resize(PHOTO, Image.BICUBIC)
        noise = random.integers(-6, 7, (PHOTO[1], PHOTO[0], 1))
        file = io.BytesIO()
        Image.fromarray(np.clip(np.asarray(shapes) + noise, 0, 255).astype("uint8")).save(file, "JPEG", quality=85)
        (folder / "photos" / f"{i:04d}.jpg").write_bytes(file.getvalue())
        with tarfile.open(folder / f"{i % 4}.tar", "a") as tar:
            for name, data in ((f"{i:04d}.jpg", file.getvalue()), (f"{i:04d}.cls", str(i % 10).encode())):
                entry = tarfile.TarInfo(name)
                entry.size = len(data)
                tar.addfile(entry, io.BytesIO(data))


def _tf_data(folder: pathlib.Path, ratio: int) -> int:
    import tensorflow as tf

    def decoded(path):
        image = tf.io.decode_jpeg(tf.io.read_file(path), channels=3, ratio=ratio)
        return tf.cast(tf.round(tf.image.resize(image, SIZE[:2])), tf.uint8), 0

    data = tf.data.Dataset.list_files(f"{folder}/photos/*.jpg", shuffle=False)
    data = data.map(decoded, num_parallel_calls=tf.data.AUTOTUNE).batch(BATCH)
    return common.count_rows(data.prefetch(tf.data.AUTOTUNE))


def _webdataset(folder: pathlib.Path) -> int:
    import numpy as np
    import webdataset
    from PIL import Image

    def decoded(data):
        return np.asarray(Image.open(io.BytesIO(data)).convert("RGB").resize(SIZE[:2], Image.BILINEAR))

    tars = sorted(str(path) for path in folder.glob("*.tar"))
    data = webdataset.WebDataset(tars, shardshuffle=False).to_tuple("jpg", "cls").map_tuple(decoded, int)
    return sum(len(labels) for _, labels in data.batched(BATCH))


def once(count: str, repeats: str, address: str) -> None:
    """Every way in turn, in a process of its own."""
    import ray
    from ray.train import ScalingConfig

    import raytf
    from raytf.data import ingest
    from raytf.data.batch_spec import BatchSpec
    from raytf.data.feed import Feed
    from raytf.data.sampling import Sampling

    common.connect(address)
    with tempfile.TemporaryDirectory(prefix="raytf_images_") as name:
        folder = pathlib.Path(name)
        write(folder, int(count))

        def labelled(batch):
            return {"image": batch["bytes"], "label": [0] * len(batch["bytes"])}

        photos = ray.data.read_binary_files(f"{folder}/photos").map_batches(labelled, udf_modifying_row_count=False)
        runs = {
            "tf.data": lambda: _tf_data(folder, 1),
            "tf.data, ratio": lambda: _tf_data(folder, 2),
            "WebDataset": lambda: _webdataset(folder),
        }
        for way, draft in (("raytf", False), ("raytf, draft", True)):
            spec = BatchSpec.parsed(raytf.Column("image", image=SIZE, draft=draft), "label")
            rows = ingest.read_all({"train": photos}, True, ScalingConfig(num_workers=1), spec.roles)["train"]
            feed = Feed(rows, spec, Sampling(global_batch=BATCH, shuffle="full"))
            runs[way] = lambda feed=feed: common.count_rows(feed.dataset())
        found: dict[str, list] = {way: [] for way in runs}
        for repeat in range(int(repeats) + 1):
            for way, run in runs.items():
                began, used = time.perf_counter(), time.process_time()
                images = run()
                if repeat:  # the first warms up
                    seconds, cpu = time.perf_counter() - began, time.process_time() - used
                    found[way].append((images / seconds, images / cpu))
    common.give(found)


def main(arguments=None):
    from raytf.runtime.allocator import allocator

    options = common.parser(__doc__).parse_args(arguments)
    repeats, count = (1, 24) if options.smoke else (options.repeats, FILES)
    with common.ray_cluster(store_bytes=1 << 30) as address:
        found = common.measure(__file__, "--once", str(count), str(repeats), address, environment=allocator(1))
    middle = {way: [common.spread(rates)[0] for rates in zip(*pairs, strict=True)] for way, pairs in found.items()}
    rows = [
        [
            way,
            *(f"{rate:,.0f}" for rate in middle[way]),
            *(f"{a / b:.2f}x" for a, b in zip(middle[way], middle["tf.data"], strict=True)),
        ]
        for way in WAYS
    ]
    head = ["way", "images/s", "images for a second of a core", "times tf.data", "times tf.data, by cores"]
    shown = common.table(f"JPEG of {PHOTO[0]} x {PHOTO[1]} as {SIZE[0]} x {SIZE[1]}, median of {repeats}", head, rows)
    common.finish(options, "images", shown, found)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--once"]:
        once(*sys.argv[2:5])
    else:
        main()
