"""The page about a single run: what its folder contains of curves, workers, restarts and checkpoints."""

from __future__ import annotations

import json

import pyarrow.fs
import pytest

from raytf import events
from raytf.errors import ConfigError
from raytf.events import Kind, RunEvent
from raytf.train import run_list
from raytf.tune import report
from raytf.worker import figures
from tests.unit.test_charts import Checked
from tests.unit.test_command_line import epoch


def line(rank: int, number: int, pid: int, workers: int = 2, **more) -> dict:
    its = {"rank": rank, "workers": workers, "host": "h", "pid": pid, "epoch": number, "step": 10 * number}
    its |= {"time": 1e9 + 100 * number + rank, "seconds": 2.0, "steps": 10, "examples_per_second": 500.0}
    its |= {"step_seconds": 0.2, "input_wait": 0.1, "communication": 0.3, "checkpoint_seconds": 0.01}
    return its | {"learning_rate": 0.1, "memory_bytes": 1 << 28} | more


def write(folder, lines) -> None:
    (folder / figures.FOLDER).mkdir(parents=True, exist_ok=True)
    for one in lines:
        with open(folder / figures.FOLDER / f"worker_{one['rank']}.jsonl", "a") as file:
            file.write(json.dumps(one) + "\n")


@pytest.fixture
def run(tmp_path):
    """A run of three epochs, on two workers, of which one was replaced, and all were started again."""
    record = events.Recorder(pyarrow.fs.LocalFileSystem(), str(tmp_path / "first"))
    for number, kind in enumerate(("workers_started", "worker_replaced", "workers_started")):
        record(RunEvent(kind=Kind(kind), ranks=(1,), workers=2, seconds=3.0, time=1e9 + number))
    epoch(tmp_path, "first", 3, loss=[100.0, 1.0, 0.01], val_loss=[90.0, 2.0, 0.5])
    pids = {(0, 1): 1, (1, 1): 2, (0, 2): 1, (1, 2): 2, (0, 3): 1, (1, 3): 7}
    write(tmp_path / "first", [line(rank, number, pid) for (rank, number), pid in pids.items()])
    return tmp_path / "first"


def text_of(folder) -> str:
    report.write_report(str(folder), str(folder / "page.html"))
    text = (folder / "page.html").read_text()
    Checked(
        text.replace("<meta charset='utf-8'>", "")
        .partition("<style>")[2]
        .partition("</style>")[2][: -len("</html>\n") - 7]
        .removeprefix("</head><body>")
    )
    return text


def test_a_page_about_a_run(run):
    text = text_of(run)
    for label in (
        *("loss by epoch", "learning rate by epoch", "examples/s, all workers by epoch", "time of a step by epoch"),
        *("waiting for input", "communication, share", "memory of the process", "standing still for checkpoints"),
    ):
        assert f'aria-label="{label}' in text, label
    assert "worker 1 was lost and is replaced in place after 3.0 s" in text and "finished" in text and "3/3" in text
    assert text.count("2 worker(s) start") == 2 and "starts of all workers" in text
    assert "val_loss 0.5 (epoch 3)" in text and "268MB" in text and len(text) < 60_000
    assert "checkpoint_2026-01-03" in text and "<script" not in text


def test_a_run_without_figures_has_its_curves(tmp_path):
    epoch(tmp_path, "old", 2, loss=[2.0, 1.0])
    text = text_of(tmp_path / "old")
    assert 'aria-label="loss by epoch"' in text and "Workers over time" not in text


def test_a_run_that_failed_in_its_first_epoch_has_its_events(tmp_path):
    record = events.Recorder(pyarrow.fs.LocalFileSystem(), str(tmp_path / "failed"))
    record(RunEvent(kind=Kind.WORKERS_STARTED, workers=2))
    record(RunEvent(kind=Kind.WORKER_FAILED, ranks=(1,), why="ValueError: <no>"))
    text = text_of(tmp_path / "failed")
    assert "worker 1 failed: ValueError: &lt;no&gt;" in text and "No epoch has ended." in text
    assert [(run.name, run.state) for run in run_list.listed(tmp_path)] == [("failed", "empty")]


def test_a_run_of_nan_has_a_sentence(tmp_path):
    bad = float("nan")
    epoch(tmp_path, "nan", 2, loss=[bad, bad], val_loss=[1.0, bad])
    text = text_of(tmp_path / "nan")
    assert "loss is NaN or infinite in 2 epochs, the first of which is epoch 1." in text
    assert "val_loss is NaN or infinite in epoch 2." in text


def test_a_metric_of_the_validation_alone_has_a_chart(tmp_path):
    epoch(tmp_path, "first", 2, loss=[2.0, 1.0], val_loss=[2.0, 1.0], val_score=[0.1, 0.2])
    text = text_of(tmp_path / "first")
    assert 'aria-label="val_score by epoch"' in text and text.count('aria-label="loss by epoch"') == 1


def test_lines_that_were_cut_off_or_crafted_are_left_out(run):
    with open(run / figures.FOLDER / "worker_0.jsonl", "a") as file:
        file.write(json.dumps(line(0, 4, 1, seconds="<script>")) + "\n[1]\n" + '{"rank": 0, "ep')
    (run / figures.FOLDER / "worker_9.jsonl").write_bytes(b"\xff\xfe")
    assert "<script" not in text_of(run)


def test_a_folder_that_is_no_run_or_holds_several(run, tmp_path):
    epoch(tmp_path, "second", 1, loss=[1.0])
    for folder, message in ((tmp_path, "it holds 2 runs"), (run / figures.FOLDER, "a run or of a sweep")):
        with pytest.raises(ConfigError, match=message):
            report.write_report(str(folder), str(tmp_path / "page.html"))


def test_a_run_with_parameter_servers_has_the_figures_that_its_coordinator_knows(tmp_path):
    epoch(tmp_path, "first", 2, loss=[2.0, 1.0])
    unknown = {"input_wait": None, "communication": None}
    write(tmp_path / "first", [line(0, number, 1, **unknown) for number in (1, 2)])
    text = text_of(tmp_path / "first")
    assert 'aria-label="examples/s' in text and 'aria-label="waiting for input' not in text
