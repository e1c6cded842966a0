from hypothesis import given
from hypothesis import strategies as st

from raytf.console.progress import Board, Rate, Reader, describe


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
    reader = Reader(Board(entries))
    for first, attempt in attempts:
        chief, epoch = Board(entries), first
        for action in attempt:
            actions += 1
            if action == "read":
                shown += reader.new()[0]
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
    shown += reader.new()[0]
    assert [line.partition("  3%")[0].split("  ")[:3] for line in shown] == [e.split("  ") for e in expected]
