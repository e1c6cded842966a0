"""Processes that train and end: how many are aborted as Python ends.

python jobs/benchmarks/ends.py
python jobs/benchmarks/ends.py --smoke

Python 3.11 ends a thread that asks for its lock while the interpreter ends. Where that thread runs C++, the whole
process is aborted: signal 6, "FATAL: exception not rethrown", after a training that succeeded. Each process here is a
fork of one that has imported TensorFlow and raytf, trains for a moment, leaves something undone, and ends as a script
does, by its last line:

* `fit`: Keras' `fit` over a Python generator with `prefetch`;
* `left`: the same, and iterators over tuned pipelines that are in the middle;
* `pair`: two workers of MultiWorkerMirroredStrategy, as `raytf run` starts them and the doctor tries them.

The exit code is 1 if any process ends in another way than with 0, or has not within `LIMIT` seconds.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time

import common

from raytf.runtime.topology import tf_config

KINDS = {"fit": 1, "left": 1, "pair": 2}
LIMIT = 300.0


def fit() -> None:
    import numpy as np
    import tensorflow as tf
    from keras import Sequential, layers

    def rows():
        for _ in range(64):
            yield np.ones(4, "float32"), np.ones(1, "float32")

    signature = tuple(tf.TensorSpec((width,), tf.float32) for width in (4, 1))
    model = Sequential([layers.Input((4,)), layers.Dense(1)])
    model.compile("sgd", "mse")
    data = tf.data.Dataset.from_generator(rows, output_signature=signature).batch(8).prefetch(tf.data.AUTOTUNE)
    model.fit(data, epochs=2, verbose=0)


def left() -> None:
    """Iterators that nobody ends: some that the end of Python finds, some that are freed just before."""
    import tensorflow as tf

    def slow(number):
        time.sleep(0.001)
        return number

    def in_python(number):
        return tf.py_function(slow, [number], tf.int64)

    fit()
    made = tf.data.Dataset.range(1 << 30).map(in_python, num_parallel_calls=tf.data.AUTOTUNE).prefetch(4)
    kept = [iter(made) for _ in range(2)]
    freed = iter(made)
    for iterator in (*kept, freed):
        next(iterator)
    globals()["_kept"] = kept
    del freed


def pair() -> None:
    from raytf.doctor import two_steps

    two_steps.main()


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--ends", type=int, default=500, help="processes of each kind")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--at-once", type=int, default=4, help="processes that run at a time")
    options = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"

    from raytf.parallel import trainer

    trainer.install()
    rows, figures, bad = [], {}, 0
    for kind in options.kinds:
        wanted = 4 if options.smoke else options.ends
        codes, seconds = _ends(kind, wanted, options.at_once)
        if codes is None:
            return  # in a process that ends by its last line
        figures[kind] = {"codes": codes, "seconds": seconds}
        others = [code for code in codes if code != 0]
        bad += len(others)
        other_codes = ", ".join(f"{code}: {others.count(code)}" for code in sorted(set(others))) or "none"
        rows.append((kind, len(codes), codes.count(0), codes.count(-signal.SIGABRT), other_codes, f"{seconds:.1f}"))
    head = ("kind", "processes", "ended with 0", "aborted", "other codes", "s in the median")
    common.finish(options, "ends", common.table("Ends of processes", head, rows), figures)
    if bad:
        raise SystemExit(f"{bad} processes have not ended well")


def _ends(kind: str, wanted: int, at_once: int) -> tuple[list[int] | None, float]:
    """Exit codes of so many processes, a signal's as its negative number; None in one of them, when it is to end."""
    codes, took, running = [], [], {}
    with tempfile.TemporaryFile() as errors:
        while len(codes) < wanted or running:
            while len(codes) + len(running) < wanted and len(running) < at_once:
                addresses = common.free_addresses(KINDS[kind])
                for rank in range(KINDS[kind]):
                    pid = os.fork()
                    if not pid:
                        os.dup2(errors.fileno(), 2)
                        signal.alarm(int(LIMIT))
                        _work(kind, addresses, rank)
                        return None, 0.0
                    running[pid] = time.monotonic()
            pid, status = os.wait()
            took.append(time.monotonic() - running.pop(pid))
            codes.append(os.waitstatus_to_exitcode(status))
        if any(codes):
            errors.seek(0)
            sys.stderr.write(errors.read().decode(errors="replace")[-5000:])
    return codes, sorted(took)[len(took) // 2]


def _work(kind: str, addresses: list[str], rank: int) -> None:
    if len(addresses) > 1:
        os.environ["TF_CONFIG"] = tf_config({"worker": addresses}, "worker", rank)
    {"fit": fit, "left": left, "pair": pair}[kind]()


if __name__ == "__main__":
    main()
