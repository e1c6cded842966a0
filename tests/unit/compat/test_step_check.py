"""Versions that are not in the table are looked at before training starts, a step, too, in seconds."""

import json
import subprocess
import sys

import pytest

CHECK = """
import json, resource, sys
from raytf.compat.fast_import import import_keras
import_keras()
from raytf.compat import versions
versions.TESTED["keras"] = ("3.11",)
from raytf.train import dry_run, entry

def other_results():
    from raytf.parallel import gradients
    gradients.mean = list
    return dry_run._check_versions()

def gone():
    from keras.src.optimizers.base_optimizer import BaseOptimizer
    del BaseOptimizer.apply
    return dry_run._check_versions()

def elsewhere():
    sys.modules["keras.src.ops.function"] = None
    try:
        entry.import_raytf()
    except ImportError as error:
        return error

def seconds(whose):
    used = resource.getrusage(whose)
    return used.ru_utime + used.ru_stime

imports = seconds(resource.RUSAGE_SELF)
fits = repr(dry_run._in_a_copy(dry_run._check_versions))
answers = {"fits": fits, "seconds": seconds(resource.RUSAGE_CHILDREN), "imports": imports}
for function in (other_results, gone, elsewhere):
    answers[function.__name__] = repr(dry_run._in_a_copy(function))
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def reports():
    """Returns the check's outcome in copies of a process, and the CPU seconds of the first one and of the imports."""
    done = subprocess.run([sys.executable, "-c", CHECK], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.slow
def test_a_version_that_fits_is_used_with_a_line(reports):
    assert "is not tested with raytf" in reports["fits"] and "keras 3." in reports["fits"]
    assert "training continues" in reports["fits"]
    assert reports["seconds"] < 1.5 * reports["imports"], "on a quiet machine it takes 2.5 s"


@pytest.mark.slow
def test_a_step_with_other_results_is_refused(reports):
    report = reports["other_results"]
    assert report.startswith("UnsupportedVersionError") and "a step on two devices has" in report


@pytest.mark.slow
def test_a_step_that_fails_is_refused(reports):
    report = reports["gone"]
    assert report.startswith("UnsupportedVersionError") and "a step failed with TypeError" in report


@pytest.mark.slow
def test_what_is_elsewhere_is_refused_by_its_name(reports):
    report = reports["elsewhere"]
    assert report.startswith("UnsupportedVersionError") and "keras.src.ops.function" in report
