"""`verify`: two workers against one device. What differs is named, and what does not raises no alarm."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys

import psutil
import pytest

from raytf import validation
from raytf.errors import ConfigError
from raytf.train import arguments, verify

ROOT = pathlib.Path(__file__).parents[2]


def proofs_of(names, tmp_path) -> dict[str, dict]:
    """The proofs of models of `models_to_verify`, from a process that has run no TensorFlow."""
    path = tmp_path / "proofs.json"
    run = [sys.executable, "-m", "tests.unit.models_to_verify", str(path), *names]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "-1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(run, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(path.read_text())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_wrong_model_is_distinguished_from_a_right_one(tmp_path):
    proofs = proofs_of(("many_kinds", "counter"), tmp_path)
    assert not proofs["many_kinds"]["differences"] and proofs["many_kinds"]["failed"] is None, proofs["many_kinds"]
    assert "counter/seen" in " | ".join(proofs["counter"]["differences"])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_is_equal_raises_no_alarm(tmp_path):
    """Dropout, augmentation, statistics of batches, accumulation and half precision differ by design, or not at all."""
    names = (
        "compares_rows",
        "random_layers",
        "normalized",
        "accumulated",
        "half",
        "own_draws",
        "own_generator",
        "for_graphs_alone",
    )
    for name, proof in proofs_of(names, tmp_path).items():
        assert not proof["differences"] and proof["failed"] is None and proof["skipped"] is None, (name, proof)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_differs_is_named_with_its_cause(tmp_path):
    wanted = {
        "counter": ("counter/seen", "12 on one device, 6 on two workers", "aggregation='sum'"),
        "divides_by_its_rows": ("all weights", "train_step (models_to_verify.py, line "),
        "python_state": ("all weights", "own_step.scale in Python"),
        "mixes_rows": ("all weights", "Mixes (models_to_verify.py, line "),
        "compares_in_its_step": ("all weights", "train_step (models_to_verify.py, line "),
        "rate_by_its_loss": ("all weights", "compute_loss (models_to_verify.py, line "),
        "slow_weights": ("the optimizer's state, most of all ", "/noted: ", "compute_loss (models_to_verify.py, line "),
        "rate_by_rows": ("the learning rate of optimizer: 0.001 on one device, 0.01 on two workers",),
        "set_by_the_first_batch": ("other weights than each other",),
        "balances_experts": ("Experts (models_to_verify.py, line ", "pass means to add_loss"),
        "numbers_of_a_clock": ("other weights than each other",),
        "sum_of_halves": ("all weights", "train_step (models_to_verify.py, line "),
        "first_rows_of_a_step": ("all weights", "train_step (models_to_verify.py, line "),
        "first_rows_of_a_layer": ("all weights", "Fixed (models_to_verify.py, line "),
    }
    proofs = proofs_of(wanted, tmp_path)
    for name, texts in wanted.items():
        differences = " | ".join(proofs[name]["differences"])
        assert proofs[name]["failed"] is None, (name, proofs[name])
        for text in texts:
            assert text in differences, (name, differences)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_cannot_be_compared_is_reported_and_ends_nothing(tmp_path):
    proofs = proofs_of(("broken", "too_large", "random_numbers_of_numpy"), tmp_path)
    assert "RuntimeError: no such model" in proofs["broken"]["failed"]
    assert "MiB" in proofs["too_large"]["skipped"]
    random = proofs["random_numbers_of_numpy"]
    assert not random["differences"] and "log loss" in random["random"]


def test_error_contains_rule_received_and_fix():
    proof = verify.VerificationResult(differences=("the log loss: 1 on one device, 2 on two workers; its rows",))
    verify.report_result(verify.VerificationResult(), "error")
    verify.report_result(verify.VerificationResult(skipped="one row"), "error")
    with pytest.raises(ConfigError, match="the log loss: 1 on one device"):
        verify.report_result(proof, "error")
    with pytest.raises(ConfigError, match="no result: it was killed"):
        verify.report_result(verify.VerificationResult(failed="it was killed"), "error")
    with pytest.warns(UserWarning, match="the log loss: 1 on one device"):
        verify.report_result(proof, "warn")


class _Equal(verify._Supervisor):
    """Finds no difference, and that a whole batch takes so many seconds."""

    seconds, failed = 1e6, None

    def _compared(self):
        again, self._whole_s = self._whole_s is not None, self.seconds
        return verify.VerificationResult(failed=self.failed if again else None)


@pytest.mark.parametrize(("seconds", "failed", "why"), [(1e6, None, "3000000 s"), (0.0, "no memory", "no memory")])
def test_too_few_rows_for_a_whole_batch_are_reported(caplog, seconds, failed, why):
    supervisor = _Equal(lambda: None, os.getpid())
    supervisor.seconds, supervisor.failed = seconds, failed
    proof = supervisor.run()
    assert proof.failed is None and why in proof.few
    with caplog.at_level("INFO", verify.logger.name):
        verify.report_result(proof, "error")
    assert "a whole batch was not compared" in caplog.text and why in caplog.text


@pytest.mark.parametrize("word", [True, "yes", None, 0, 1])
def test_other_words_are_refused(word):
    with pytest.raises(ConfigError, match="verify must be"):
        validation.check_word("verify", word, arguments.VERIFY_WORDS)


def _held_trial():
    """(a trial that raises when something is written, where to write)."""
    reader, writer = os.pipe()

    def trial():
        os.read(reader, 1)
        raise RuntimeError("was let go")

    return trial, writer


def test_an_outcome_may_be_asked_for_again():
    trial, writer = _held_trial()
    running = verify.start_comparison(trial)
    assert verify.outcome(running, 0.0) is None
    os.write(writer, b"123456")  # two workers and a device, with a graph and without
    proof = verify.outcome(running, 60.0)
    assert proof.failed is not None and "was let go" in proof.failed
    assert (
        verify.outcome(verify.start_comparison(verify.VerificationResult(skipped="one row")), 60.0).skipped == "one row"
    )


def test_a_comparison_that_is_cancelled_leaves_no_process():
    trial, _ = _held_trial()
    running = verify.start_comparison(trial)
    assert verify.outcome(running, 0.0) is None
    verify.cancel(running)
    with pytest.raises(ChildProcessError):
        os.waitpid(running.pid, os.WNOHANG)
    with pytest.raises(ProcessLookupError):
        os.kill(running.pid, 0)


def test_few_rows_come_from_all_over_a_block_and_divide_unevenly():
    import pyarrow as pa

    from raytf.data.stored import StoredDataset

    def few(count, width=1):
        table = pa.table({"x": list(range(count)), "wide": [b"." * width] * count})
        found = verify.few_rows(StoredDataset([table], [count], ["x", "wide"]))
        return None if found is None else (found[0].refs[0]["x"].to_pylist(), found[1])

    assert few(1) is None
    assert few(2) == ([0, 1], 2)
    places, first = few(1000)
    assert (places[0], places[-1], len(places), first) == (0, 999, 12, 7)
    assert len(few(100, width=1 << 17)[0]) == 6 and few(100, width=1 << 17)[1] == 3


def test_rows_come_from_several_blocks_if_these_have_few():
    """`ray.data.from_items` makes a block of each of few rows."""
    import pyarrow as pa

    from raytf.data.stored import StoredDataset

    blocks = [pa.table({"x": [i]}) for i in range(200)]
    first = StoredDataset(blocks, [1] * 200, ["x"]).first()
    assert len(first.refs) == 128
    assert verify.few_rows(first)[0].rows == [12] and verify.whole_batch(first, 32)[1] == 32
    assert len(StoredDataset(blocks, [1000] * 200, ["x"]).first().refs) == 1


def test_a_whole_batch_is_that_of_the_training_if_it_is_small():
    import pyarrow as pa

    from raytf.data.stored import StoredDataset

    def whole(batch, count=2000, width=1):
        table = pa.table({"x": list(range(count)), "wide": [b"." * width] * count})
        found = verify.whole_batch(StoredDataset([table], [count], ["x", "wide"]), batch)
        return None if found is None else (found[0].refs[0].num_rows, found[1])

    assert whole(64) == (69, 64) and whole(4096) == (1029, 1024) and whole(64, count=40) == (40, 35)
    assert whole(7) is None and whole(64, count=12) is None and whole(64, width=1 << 17) is None


def test_what_trains_ends_with_the_process_that_asked_for_it():
    """Ray kills the children of a worker that it ends, and not theirs."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        run = verify.start_run(lambda: signal.pause())
        os.write(writer, str(run.pid).encode())
        signal.pause()
        os._exit(0)
    run = psutil.Process(int(os.read(reader, 20)))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with contextlib.suppress(psutil.NoSuchProcess):
        run.wait(30)
    assert not run.is_running() or run.status() == psutil.STATUS_ZOMBIE
    os.close(reader)
    os.close(writer)
