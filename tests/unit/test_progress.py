import io
import sys
import threading
import time

import numpy
import rich.console
from hypothesis import given
from hypothesis import strategies as st
from ray.exceptions import RpcError

from raytf.console import phases as phases_module
from raytf.console.phases import Phases
from raytf.console.progress import Board, BoardReader, BoardWriter, ProgressLine, Rate, describe, format_metric
from raytf.train.tensorflow_trainer import ReportLines
from tests.logged import warnings_logged
from tests.waiting import until


def update(epoch, step, ended=False, at=0.0, writer="a", **logs):
    made = {"epoch": epoch, "epochs": 4, "step": step, "steps": 10, "rows": 32, "logs": logs, "ended": ended}
    return made | {"waiting": 0.031, "at": at, "writer": writer}


def test_rate_and_time_left():
    rate = Rate()
    assert rate(update(1, 5)) == (None, None)
    examples, left = rate(update(2, 5, at=2.0))
    assert examples == 10 * 32 / 2 and left == 25 * 2 / 10
    assert rate(update(3, 5, at=1e9, writer="b")) == (None, None), "another process has another clock"


def test_the_line():
    text = describe(update(2, 5, loss=0.5, accuracy=0.25), 1234.5, 75)
    assert (
        text == "epoch 2/4  step 5/10  loss 0.5000  accuracy 0.2500  1,234 examples/s  3% waiting for input  1:15 left"
    )


def test_an_unknown_number_of_steps():
    unknown = update(1, 3) | {"steps": None}
    assert describe(unknown, *Rate()(unknown)) == "epoch 1/4  step 3/?  3% waiting for input"


class Memory(dict):
    """Entries that can lose the writer between two of its writes."""

    def put(self, name, value):
        if name == "last" and self.pop("dies", None):
            raise KeyboardInterrupt
        self[name] = value


@given(
    st.lists(st.tuples(st.integers(1, 6), st.lists(st.sampled_from(["step", "end", "read"]))), max_size=5),
    st.integers(0, 40),
)
def test_each_end_of_an_epoch_has_one_line_through_restarts_and_slow_reads(attempts, death):
    """An attempt is a chief in a process of its own, which begins at an epoch and makes steps; one dies in a write."""
    entries, shown, expected, actions = Memory(), [], [], 0
    reader = BoardReader(Board(entries))
    for first, attempt in attempts:
        chief, epoch = Board(entries), first
        for action in attempt:
            actions += 1
            if action == "read":
                shown += reader.new_lines()[0]
                continue
            made = update(epoch, 10 if action == "end" else 3, ended=action == "end", count=float(len(expected)))
            if action == "end":
                expected.append(f"epoch {epoch}/4  step 10/10  count {len(expected)}.0000")
                epoch += 1
            if actions == death:
                entries["dies"] = True
            try:
                chief.write(made)
            except KeyboardInterrupt:
                break
            finally:
                entries.pop("dies", None)
    shown += reader.new_lines()[0]
    assert [line.partition("  3%")[0].split("  ")[:3] for line in shown] == [e.split("  ") for e in expected]


class Output(list):
    """A console without a terminal, or with one."""

    is_terminal, encoding = False, "utf-8"

    def print(self, text, **how):
        self.append(text)


def test_a_phase_that_lasts_has_one_line_where_lines_stay(monkeypatch):
    monkeypatch.setattr(phases_module, "_WORTH_A_LINE", 0.05)
    output = Output()
    with Phases(output, "first") as phases:
        until(lambda: output == ["first ..."])
        phases.begin("second")
        until(lambda: output == ["first ...", "second ..."])
        phases.begin(None)
        phases.begin("second")
        phases.begin("third")
        until(lambda: output[-1] == "third ...")
    assert output == ["first ...", "second ...", "third ..."]
    assert not [thread for thread in threading.enumerate() if thread.name == "raytf_phases"]


def test_a_short_phase_has_none_and_nothing_is_shown_without_a_console():
    output = Output()
    for console in (output, None):
        with Phases(console, "first") as phases:
            phases.begin("second")
            phases.close()
            phases.close()
    assert output == []


def test_a_phase_in_a_terminal_moves_and_goes():
    out = io.StringIO()
    console = rich.console.Console(file=out, force_terminal=True, width=80)
    phases = Phases(console, "starting Ray")
    frames = set()
    for seconds in (0.0, 0.25, 3.0):
        phases._phase_began = time.monotonic() - seconds
        frames.add(phases.__rich__().plain)
    assert len(frames) == 3 and all("starting Ray ..." in frame for frame in frames)
    assert any(frame.endswith("... 3 s") for frame in frames)
    with phases:
        phases.show("epoch 1/2")
        assert phases.__rich__().plain == "epoch 1/2"
    assert "starting Ray" not in console.render_str(out.getvalue().rpartition("\x1b[2K")[2]).plain, "it is transient"


def test_phases_of_a_board():
    entries = Memory()
    board, chief = Board(entries), Board(entries)
    reader = BoardReader(board)
    assert reader.new_lines() == ([], None, phases_module.WORKERS)
    chief.begin("")
    assert reader.new_lines() == ([], None, None), "a loop of the user's"
    chief.begin(phases_module.FIRST_STEP)
    assert reader.new_lines() == ([], None, phases_module.FIRST_STEP)
    chief.write(update(1, 3))
    assert reader.new_lines()[2] is None and reader.new_lines()[1].startswith("epoch 1/4")
    chief.write(update(3, 10, ended=True))
    assert reader.new_lines()[1:] == (None, None)
    chief.begin(phases_module.ENDING)
    assert reader.new_lines()[2] == phases_module.ENDING, "a callback has ended the training"
    chief.begin(phases_module.FIRST_STEP)
    assert reader.new_lines()[2] is None, "all workers start again"
    chief.write(update(4, 10, ended=True))
    assert reader.new_lines()[2] == phases_module.ENDING


class Away(Memory):
    """Entries of a head that does not answer while `away` is True."""

    away, asked = False, 0

    def get(self, name):
        self._check()
        return super().get(name)

    def put(self, name, value):
        self._check()
        super().put(name, value)

    def _check(self):
        self.asked += self.away
        if self.away:
            raise RpcError("RPC error: CANCELLED")


def test_a_long_epoch_has_a_line_now_and_then_in_a_log():
    entries, out, seconds = Memory(), io.StringIO(), [0.0]
    chief = Board(entries)
    shown = lambda: out.getvalue().splitlines()
    with ProgressLine(Board(entries), rich.console.Console(file=out, width=200), lambda: seconds[0]):
        chief.write(update(1, 3))
        seconds[0] = 299.0
        chief.write(update(1, 4, ended=True))
        until(lambda: len(shown()) == 1)
        chief.write(update(2, 5))
        seconds[0] = 600.0
        until(lambda: len(shown()) == 2)
    assert "step 4/10" in shown()[0] and "step 5/10" in shown()[1]


def test_progress_continues_when_the_head_answers_again():
    entries, out = Away(), io.StringIO()
    chief = Board(entries)
    with ProgressLine(Board(entries), rich.console.Console(file=out, width=200)):
        entries.away = True
        chief.begin(phases_module.FIRST_STEP)
        chief.write(update(1, 10, ended=True))
        until(lambda: entries.asked > 3)  # the thread has asked as well
        entries.away = False
        chief.write(update(2, 10, ended=True))
        until(lambda: "epoch 2/4" in out.getvalue())
    assert "epoch 1/4" not in out.getvalue()


def test_the_end_of_a_training_begins_the_last_phase_whatever_ends_it():
    import keras

    from raytf.worker.callbacks import ProgressCallback

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    board = Board(Memory())
    stops = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: setattr(model, "stop_training", True))
    progress = ProgressCallback(board, global_batch=2, waited=None)
    rows = numpy.ones((4, 1))
    model.fit(rows, rows, batch_size=2, epochs=9, verbose=0, callbacks=[stops, progress])
    lines, running, phase = BoardReader(board).new_lines()
    assert len(lines) == 1 and running is None and phase == phases_module.ENDING


def test_a_training_does_not_wait_for_a_head_that_does_not_answer():
    import keras

    from raytf.worker.callbacks import ProgressCallback

    answers = threading.Event()

    class Overloaded(Memory):
        def put(self, name, value):
            if not answers.wait(60):
                raise AssertionError("the training has waited for the head")
            super().put(name, value)

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    board, rows = Board(Overloaded()), numpy.ones((4, 1))
    at_last = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: epoch == 2 and answers.set())
    model.fit(rows, rows, epochs=3, verbose=0, callbacks=[ProgressCallback(board, 4, None, 0.0), at_last])
    lines, running, phase = BoardReader(board).new_lines()
    assert [line.split("  ")[0] for line in lines] == [f"epoch {epoch}/3" for epoch in (1, 2, 3)]
    assert running is None and phase == phases_module.ENDING


def test_a_head_that_never_answers_costs_a_training_one_timeout_and_a_sentence(set_timeouts):
    answers = threading.Event()
    board = Board(Memory())
    board.begin = lambda phase: answers.wait(60)
    writer = BoardWriter(board)
    set_timeouts(head_answer=0.1)
    with warnings_logged("Progress is not shown to its end") as seen:
        writer.begin(phases_module.ENDING)
        writer.close()
    assert len(seen) == 1 and "(timeout)" in seen[0]
    answers.set()


def test_small_and_large_values_keep_their_digits():
    values = {0.0: "0.0000", 1e-5: "1e-05", -3.14159e-3: "-0.003142", 0.25: "0.2500", 12.5: "12.5000", 1e9: "1e+09"}
    assert [format_metric(value) for value in values] == list(values.values())
    assert format_metric(float("nan")) == "nan" and format_metric(float("inf")) == "inf"
    assert "  loss 3e-06  learning_rate 1e-05  " in describe(update(1, 1, loss=3e-6, learning_rate=1e-5), None, None)


def test_no_time_is_left_when_the_last_epoch_has_ended():
    assert "left" not in describe(update(4, 10, ended=True), 10.0, 0.0)
    assert "left" not in describe(update(4, 9), 10.0, 0.4)
    assert describe(update(2, 10, ended=True), 10.0, 20.0).endswith("0:20 left")
    assert describe(update(2, 10), 10.0, 7509.0).endswith("  2:05:09 left")


def test_the_first_phase_is_a_connection_where_a_cluster_is_named(monkeypatch):
    monkeypatch.delitem(sys.modules, "ray", raising=False)  # another test may have started it
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert phases_module.starting_phase() == "connecting to Ray"
    assert phases_module.starting_phase("It has ended").startswith("It has ended; connecting to Ray to see")
    monkeypatch.setenv("RAY_ADDRESS", "local")
    assert phases_module.starting_phase() == "finding or starting Ray"


def test_reports_of_a_loop_have_lines_unless_a_fit_shows_its_progress(capsys):
    entries, seconds = Memory(), [0.0]
    lines = ReportLines(Board(entries), clock=lambda: seconds[0])
    report = lambda at, **metrics: (seconds.__setitem__(0, at), lines.after_report(None, [metrics, {}], None))
    report(0.0, loss=numpy.float32(0.5), epoch=1, name="a", values=[1, 2])
    report(0.5, loss=0.4, epoch=2)
    report(1.0, loss=0.3, epoch=3)
    Board(entries).write(update(1, 3))
    report(3.0, loss=0.2, epoch=4)
    assert capsys.readouterr().out.splitlines() == ["report  loss 0.5000  epoch 1", "report  loss 0.3000  epoch 3"]
