"""The examples in docstrings of public names run as they are typed, in a process of a user's."""

from __future__ import annotations

import doctest
import inspect
import os
import pathlib
import subprocess
import sys

import pytest

import raytf

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.slow]

# Executes the lines of each, and compares what expressions give with what is written below them.
RUN = """
import doctest, inspect, operator, sys, traceback, raytf
failed = []
for name in sys.argv[1:]:
    names = {}
    try:
        for one in doctest.DocTestParser().get_examples(inspect.getdoc(operator.attrgetter(name)(raytf))):
            if one.want:
                found = repr(eval(one.source, names))
                assert found == one.want.strip(), f"{one.source}: {found}, documented: {one.want}"
            else:
                exec(one.source, names)
    except Exception:
        failed.append(name)
        traceback.print_exc()
print("failed:", *failed)
"""
# What Ray documents.
WITHOUT = {"ReportCheckpointCallback", "TensorflowCheckpoint", "prepare_dataset_shard"}
METHODS = ["KerasTrainer.fit"]


def test_every_public_name_has_an_example():
    read = doctest.DocTestParser().get_examples
    with_one = {name for name in raytf.__all__ if read(inspect.getdoc(getattr(raytf, name)) or "")}
    assert with_one | WITHOUT == set(raytf.__all__)


@pytest.mark.timeout(600)
def test_the_examples_run(ray_cluster, tmp_path):
    token = pathlib.Path.home() / ".ray" / "auth_token"
    variables = {"RAY_ADDRESS": ray_cluster.get_runtime_context().gcs_address, "HOME": str(tmp_path)}
    variables |= {"RAY_AUTH_TOKEN_PATH": str(token)} if token.exists() else {}
    done = subprocess.run(
        [sys.executable, "-c", RUN, *sorted(set(raytf.__all__) - WITHOUT), *METHODS],
        cwd=tmp_path,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert done.stdout.endswith("failed:\n"), done.stdout + done.stderr
