"""Events of a run: the line of each kind, and that it is recorded where users and reports read it."""

from __future__ import annotations

import json
import math
import re
import threading

import fsspec.implementations.local
import pyarrow.fs
import pytest

import raytf
from raytf import events
from raytf.errors import ConfigError
from raytf.events import Kind, RunEvent
from tests.lint.test_messages import PAGE, _plain
from tests.logged import warnings_logged

LOCAL = pyarrow.fs.LocalFileSystem()
NODE = "ab" * 28
# The end of the line of a hang.
HUNG = (
    "If that lasts, its process is ended, and is replaced or restarted where failures are allowed. Raise the hang "
    "timeout (hang_timeout_s=, --hang-timeout) if it is that slow by intent"
)
# (what it holds, the line) of each kind.
LINES = {
    Kind.RESOURCES_AWAITED: [
        ({"why": "the run needs", "seconds": 15.2, "more": "."}, "the run needs; waiting for 15 s.")
    ],
    Kind.RESOURCES_GIVEN: [({"seconds": 15.2}, "the cluster has given the run its resources")],
    Kind.WORKERS_STARTED: [({"workers": 2}, "2 worker(s) start")],
    Kind.WORKER_LOST: [
        ({"ranks": (1,), "why": "it died", "more": ". Another"}, "worker 1 was lost: it died. Another"),
        ({"ranks": (1,), "why": "it died"}, "worker 1 was lost: it died"),
    ],
    Kind.WORKER_FAILED: [({"ranks": (1,), "why": "ValueError: no"}, "worker 1 failed: ValueError: no")],
    Kind.WORKER_REPLACED: [
        (
            {"ranks": (0, 2), "seconds": 3.44},
            "worker 0 and worker 2 was lost and is replaced in place after 3.4 s; the others kept their processes",
        )
    ],
    Kind.WORKERS_DISCONNECTED: [
        ({}, "the workers have lost their connections, and all processes live: they are reconnected")
    ],
    Kind.WORKERS_RECONNECTED: [
        ({"seconds": 0.5}, "the workers are connected again after 0.5 s; all kept their processes")
    ],
    Kind.RECOVERY_INTERRUPTED: [
        (
            {"ranks": (1,), "why": "worker 2 was lost"},
            "worker 2 was lost, while worker 1 was replaced; recovery restarts",
        ),
        ({"why": "worker 2 was lost"}, "worker 2 was lost, while they were reconnected; recovery restarts"),
    ],
    Kind.RECOVERY_FAILED: [
        (
            {"ranks": (1,), "why": "no room", "more": ". All workers restart from the last checkpoint"},
            "worker 1 could not be replaced in place: no room. All workers restart from the last checkpoint",
        ),
        ({"why": "no answer", "step": 7}, "the workers could not be reconnected: no answer"),
    ],
    Kind.TRIAL_RESTARTED: [
        (
            {"why": "worker 1 died", "more": " It could not be replaced in place: no room."},
            "worker 1 died. It could not be replaced in place: no room. All workers of the trial restart from its "
            "last checkpoint, unless it has failed more often than FailureConfig allows",
        )
    ],
    Kind.RESIZED: [
        (
            {"workers": 2, "before": 1},
            "scaling from 1 to 2 workers after the current step",
        )
    ],
    Kind.RESIZE_DELAYED: [
        (
            {"workers": 2, "why": "no answer"},
            "scaling to 2 workers is delayed, as their processes are not ready: no answer. The run continues with the "
            "workers that it has, and retries. Examine the new nodes: raytf doctor",
        )
    ],
    Kind.STEPS_REPEATED: [
        (
            {"step": 15, "steps": 4},
            "the run resumes from step 15; at least 4 step(s) made since are repeated. More frequent checkpoints "
            "(checkpoint_every=, memory_every=) repeat fewer",
        )
    ],
    Kind.NODE_DRAINED: [({"node": NODE}, "node abababab is drained")],
    Kind.ENDED_AFTER_STEP: [({"step": 7, "why": "all have ended after step 7"}, "all have ended after step 7")],
    Kind.STOP_NOT_DELIVERED: [
        (
            {"more": "a node is drained", "why": "no answer"},
            "a node is drained, and the request to stop did not reach all workers: no answer. They continue, and "
            "recover if a worker is lost. Ctrl-C stops the run instead",
        )
    ],
    Kind.STOP_REQUESTED: [({"why": "SIGTERM", "more": "ends after this step"}, "SIGTERM: ends after this step")],
    Kind.STOPPED: [({"why": "SIGINT", "more": "ended at once"}, "SIGINT: ended at once")],
    Kind.STANDBY_STARTED: [({"node": NODE}, "a standby worker starts on node abababab")],
    Kind.STANDBY_LOST: [
        ({"node": NODE, "why": "it died"}, "the standby worker on node abababab cannot be used: it died")
    ],
    Kind.STANDBY_LIMITED: [
        (
            {"why": "KeyError"},
            "the warm-up step of a standby worker failed: KeyError. Standby workers only import TensorFlow, and "
            "replacing a lost worker takes longer, until the cause is mended",
        )
    ],
    Kind.STANDBY_GIVEN_UP: [
        (
            {"node": NODE, "why": "it died"},
            "no standby worker starts on node abababab: it died. A replacement there starts when a worker is lost, "
            "which takes longer. Mend the cause, often memory, or set spares=0",
        )
    ],
    Kind.WORKER_HUNG: [
        (
            {"ranks": (1,), "why": "stands in lock", "more": "a stack"},
            f"Hang: the other workers wait for worker 1: stands in lock. {HUNG}\na stack",
        ),
        (
            {"name": "chief 0", "why": "stands in lock"},
            f"Hang: the other workers wait for chief 0: stands in lock. {HUNG}",
        ),
    ],
    Kind.WORKER_CONTINUED: [({"ranks": (1,)}, "Hang resolved: worker 1 continues")],
    Kind.STRAGGLER: [
        (
            {"ranks": (1,), "node": "host", "why": "slower"},
            "Straggler: worker 1 on host is slower. Training continues at its pace. Look at that host: other load, a "
            "slow disk, a slow CPU",
        )
    ],
    Kind.WORKERS_RENEWED: [
        ({"why": "it grew", "more": "run the next trial"}, "it grew: new workers run the next trial")
    ],
    Kind.LOSS_NOT_FINITE: [
        (
            {
                "ranks": (0, 2),
                "workers": 3,
                "step": 12,
                "epoch": 2,
                "why": "since step 2 of epoch 2",
                "more": "It ends",
            },
            "The loss is NaN or infinite since step 2 of epoch 2, with the rows of worker 0 and worker 2. It ends",
        ),
        (
            {"ranks": (0, 1), "workers": 2, "step": 2, "epoch": 1, "why": "since step 2 of epoch 1", "more": "It ends"},
            "The loss is NaN or infinite since step 2 of epoch 1, with the rows of all workers. It ends",
        ),
        (
            {"ranks": (0,), "workers": 1, "step": 2, "epoch": 1, "why": "since step 2 of epoch 1", "more": "It ends"},
            "The loss is NaN or infinite since step 2 of epoch 1. It ends",
        ),
        ({"epoch": 3, "why": "in epoch 3", "more": "It ends"}, "The loss is NaN or infinite in epoch 3. It ends"),
    ],
    Kind.VALIDATION_NOT_FINITE: [
        (
            {"name": "val_loss, val_mae", "epoch": 2},
            "val_loss, val_mae: NaN or infinite in the validation of epoch 2, and the training continues. Look for "
            "rows of the validation that are NaN or infinite",
        )
    ],
    Kind.WEIGHTS_NOT_FINITE: [
        (
            {"name": "dense/kernel", "epoch": 2, "more": "It ends"},
            "dense/kernel has weights that are NaN or infinite at the end of epoch 2, though the loss is finite. It "
            "ends. Look for rows that are NaN or infinite",
        )
    ],
    Kind.WORKERS_DIVERGED: [
        (
            {"ranks": (1, 2), "name": "dense/bias", "epoch": 1},
            "Workers 1, 2 and worker 0 have other weights or rates than each other at the end of epoch 1: dense/bias. "
            "Something changes them on each worker for itself, as a callback or a step does that draws a number or "
            "reads a clock. Draw from a seed that all have, or let the optimizer change them",
        )
    ],
}


@pytest.mark.parametrize("kind", Kind)
def test_the_line_of_each_kind_which_is_printed_unless_it_is_silent(kind, capsys):
    for its, line in LINES[kind]:
        event = RunEvent(kind=kind, **its)
        assert str(event) == line
        events.emit(event)
        assert capsys.readouterr().err == ("" if kind in events._SILENT else f"raytf: {line}\n")


def test_printed_messages_are_in_the_troubleshooting_page():
    """By its longest part that does not come from the event."""
    page = _plain(PAGE.read_text())
    for kind in set(Kind) - events._SILENT:
        for its, line in LINES[kind]:
            filled = [re.escape(value) for value in its.values() if isinstance(value, str)]
            parts = re.split("|".join([*filled, r"\d+(?:\.\d)?", r"worker [\d#]", "abababab"]), line)
            longest = max(parts, key=len).strip(" .:;,\n")
            assert len(longest) < 10 or longest in page, (kind, longest)


def test_an_event_is_recorded_and_read_again_in_order(tmp_path):
    made = [RunEvent(kind=kind, **its) for kind, cases in LINES.items() for its, _ in cases]
    with events.recorded(events.Recorder(LOCAL, str(tmp_path))):
        for event in made:
            events.emit(event)
    events.emit(made[0])  # no longer
    assert raytf.run_events(tmp_path) == raytf.run_events(f"file://{tmp_path}") == made
    with pytest.raises(ConfigError, match="from the folder of a run"):
        raytf.run_events(tmp_path / "none")


def test_what_is_cut_off_or_crafted_is_left_out(tmp_path):
    record = events.Recorder(LOCAL, str(tmp_path))
    record(RunEvent(kind=Kind.WORKER_CONTINUED, ranks=(1,)))
    (good,) = (tmp_path / events.FOLDER).iterdir()
    content = json.loads(good.read_text())
    crafted = [{"kind": "other"}, {"ranks": ["<script>"]}, {"ranks": 3}, {"why": 3}, {"time": "x"}, {"another": 1}]
    crafted += [{"kind": "worker_replaced", "seconds": None}, {"step": []}, {"epoch": "1"}, {"ranks": [math.inf]}]
    crafted += [{"time": time} for time in (math.inf, math.nan, -1e20, 1e20)]
    for number, change in enumerate(crafted):
        (good.parent / f"{number}.json").write_text(json.dumps(content | change))
    (good.parent / "cut.json").write_text(good.read_text()[:20])
    (good.parent / "empty.json").write_text("{}")
    (good.parent / "list.json").write_text("[1]")
    (good.parent / "bytes.json").write_bytes(b"\xff\xfe")
    assert [event.ranks for event in raytf.run_events(tmp_path)] == [(1,)]


@pytest.mark.parametrize(
    ("former", "kind"), [("not_told", Kind.STOP_NOT_DELIVERED), ("worker_went_on", Kind.WORKER_CONTINUED)]
)
def test_a_file_with_a_former_name_of_a_kind_is_read(tmp_path, former, kind):
    events.Recorder(LOCAL, str(tmp_path))(RunEvent(kind=kind, ranks=(1,), why="no answer", more="a node is drained"))
    (file,) = (tmp_path / events.FOLDER).iterdir()
    file.write_text(json.dumps(json.loads(file.read_text()) | {"kind": former}))
    assert [event.kind for event in raytf.run_events(tmp_path)] == [kind]


def test_a_storage_that_takes_none_ends_that_and_not_the_run(tmp_path):
    (tmp_path / "figures").touch()
    record = events.Recorder(LOCAL, str(tmp_path))
    with warnings_logged("Events for `raytf report` end here"):
        record(RunEvent(kind=Kind.WORKER_CONTINUED))
    record(RunEvent(kind=Kind.WORKER_CONTINUED))


def test_a_storage_that_hangs_holds_up_no_recovery(tmp_path, set_timeouts):
    """Each event is written in the background, and is whole when the storage answers again."""
    set_timeouts(event_record=0.01)
    answers = threading.Event()

    class Slow(fsspec.implementations.local.LocalFileSystem):
        cachable = False

        def makedirs(self, path, exist_ok=False):
            answers.wait(60)
            super().makedirs(path, exist_ok)

    record = events.Recorder(pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(Slow())), str(tmp_path))
    happened = [RunEvent(kind=Kind.WORKER_CONTINUED, ranks=(rank,)) for rank in range(3)]
    for event in happened:
        record(event)
    assert not (tmp_path / "figures").exists()
    answers.set()
    for thread in threading.enumerate():
        if thread.name == "raytf_event":
            thread.join(60)
    assert raytf.run_events(tmp_path) == happened


def test_one_door(monkeypatch, capsys):
    taken = []
    monkeypatch.setattr(events, "_takers", [])
    events.record(taken.append)
    event = RunEvent(kind=Kind.WORKER_CONTINUED, ranks=(1,))
    with events.recorded(taken.append):
        events.emit(event)
    events.emit(event)
    assert taken == [event] * 3 and capsys.readouterr().err == "raytf: Hang resolved: worker 1 continues\n" * 2
    events.record(taken.append, logged_elsewhere={event.kind})
    events.emit(event)
    events.record(taken.append)
    assert taken == [event] * 4 and not capsys.readouterr().err
