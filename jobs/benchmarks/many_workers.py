"""What the driver computes for 1,000 workers that are simulated: at the start, at a look for hangs, as answers come.

python jobs/benchmarks/many_workers.py

Times are those of the processor that this process has used, so that a busy machine gives the same. Nothing trains, and
no process is asked: what a worker reports of itself is in Ray's object store already.
"""

from __future__ import annotations

import statistics
import time
from concurrent.futures import Future

import common

WORKERS = (1000, 2000)
HOSTS = 125


class _Ref:
    """An object ref whose answer comes when the benchmark sets it."""

    def __init__(self):
        self._future: Future = Future()

    def future(self) -> Future:
        return self._future


def answers(count: int) -> float:
    """Milliseconds to take the answers of so many workers as they come."""
    from raytf.runtime.answers import in_completion_order

    refs = [_Ref() for _ in range(count)]
    for ref in refs:
        ref.future().set_result(None)
    began = time.process_time()
    assert len(list(in_completion_order(refs, 60.0, "nothing"))) == count
    return 1e3 * (time.process_time() - began)


def start(count: int) -> float:
    """Returns milliseconds to lay a run out, and to compute and serialize the settings of each worker."""
    from ray import cloudpickle

    from raytf.runtime import cores, reservation, resources
    from raytf.runtime.settings import TensorflowConfig, WorkerSetup
    from raytf.runtime.topology import tf_config

    addresses = [f"10.0.{i % HOSTS}.1:{20_000 + i // HOSTS}" for i in range(count)]
    began = time.process_time()
    bundles, _ = reservation.bundle_layout(count, {"CPU": 8.0}, {}, "PACK", HOSTS)
    reservation.avoid_nodes(reservation.bundle_selectors(None, count), count, ["a"])
    resources.total_resources(bundles)
    pinned = cores.agree_on_pinning(addresses, [True] * count)
    shared = cloudpickle.dumps((WorkerSetup(config=TensorflowConfig()), addresses))
    for rank in range(count):
        cloudpickle.dumps((rank, pinned[rank]))
    tf_config({"worker": addresses}, "worker", count - 1)
    assert shared
    return 1e3 * (time.process_time() - began)


def looks(count: int, times: int) -> list[float]:
    """Milliseconds of each look at workers that train, after the first, which asks all of them."""
    import ray

    from raytf import activity
    from raytf.runtime.hang_watch import HangMonitor
    from raytf.runtime.process_monitor import ProcessLocation

    began, first = time.monotonic(), activity.PhaseTracker().snapshot()

    def execute(rank: int, function) -> object:
        now = time.monotonic()
        steps = int(10 * (now - began)) + 100
        status = first | {"phase": activity.STEP, "step": steps, "usual": 0.1, "clock": now}
        spent = {"step": 0.08 * steps, "sum": 0.01 * steps, "own": 0.07 * steps}
        status |= {"seconds": 0.02, "spent": status["spent"] | spent}
        return ray.put(status | {"processor": 0.09 * steps, "numbers": {activity.SUM: steps}})

    node = ray.get_runtime_context().get_node_id()
    places = {rank: ProcessLocation(node, f"10.0.{rank % HOSTS}.1", 1, None) for rank in range(count)}
    watch = HangMonitor(execute, places, 10.0, 60.0, emit=print)
    watch.close()  # its thread; looks are made here
    watch._closed.clear()
    found = []
    for _ in range(times + 2):
        now = time.process_time()
        watch._poll()
        found.append(1e3 * (time.process_time() - now))
        time.sleep(0.05)
    return found[2:]


def main(arguments=None):
    options = common.parser(__doc__).parse_args(arguments)
    counts = (100,) if options.smoke else WORKERS
    repeats = 2 if options.smoke else options.repeats
    rows, found = [], {}
    with common.ray_cluster(1, 200 << 20):
        looks(100, 2)  # what is used for the first time
        for count in counts:
            seen = looks(count, 5 * repeats)
            its = found[count] = {
                "start": [start(count) for _ in range(repeats)],
                "look": seen,
                "answers": [answers(count) for _ in range(repeats)],
            }
            rows.append([str(count), *(statistics.median(its[name]) for name in its), max(seen)])
    head = ["workers", "start, ms", "a look for hangs, ms", "answers as they come, ms", "longest look, ms"]
    title = f"Simulated workers: what the driver computes, median of {repeats}"
    common.finish(options, "many_workers", common.table(title, head, rows), found)


if __name__ == "__main__":
    main()
