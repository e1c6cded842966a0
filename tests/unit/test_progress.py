from raytf.progress import Rate, describe


def update(epoch, step, ended=False, **logs):
    made = {"epoch": epoch, "epochs": 4, "step": step, "steps": 10, "rows": 32, "logs": logs, "ended": ended}
    return made | {"waiting": 0.031}


def test_rate_and_time_left():
    times = iter([0.0, 2.0])
    rate = Rate(lambda: next(times))
    assert rate(update(1, 5)) == (None, None)
    examples, left = rate(update(2, 5))
    assert examples == 10 * 32 / 2 and left == 25 * 2 / 10


def test_the_line():
    text = describe(update(2, 5, loss=0.5, accuracy=0.25), 1234.5, 75)
    assert (
        text == "epoch 2/4  step 5/10  loss 0.5000  accuracy 0.2500  1,234 examples/s  3% waiting for input  1:15 left"
    )


def test_an_unknown_number_of_steps():
    unknown = update(1, 3) | {"steps": None}
    assert describe(unknown, *Rate()(unknown)) == "epoch 1/4  step 3/?  3% waiting for input"
