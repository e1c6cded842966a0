"""`verify` raises no alarm over what the parity scenarios know to be equal."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
SCENARIOS = [
    *("kinds_adam", "masked_tokens", "class_weight", "sample_weight", "several_inputs_and_outputs"),
    *("batch_normalization", "gradient_accumulation", "global_clipnorm_and_ema", "regularization_and_own_add_loss"),
    *("learning_rate_schedule_and_clipvalue", "train_step_OwnStep", "gan_dcgan", "gan_wgan_gp", "two_scaled_losses"),
]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_scenarios_that_are_equal_raise_no_alarm(tmp_path):
    path = tmp_path / "proofs.json"
    run = [sys.executable, "-m", "tests.processes.verified", str(path), *SCENARIOS]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "-1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(run, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=880)
    assert done.returncode == 0, done.stderr[-3000:]
    for name, proof in json.loads(path.read_text()).items():
        assert not proof["differences"] and proof["failed"] is None and proof["skipped"] is None, (name, proof)
