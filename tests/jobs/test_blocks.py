"""Every code block of the pages runs as it is typed: those of a page in order, in one folder, a process for each."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import sysconfig

import pytest

from cluster import local
from tests import blocks

PAGES = [page for page in blocks.pages() if any(block.runs for block in blocks.blocks_of(page))]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def cluster():
    """One Ray on this machine, so that the blocks need not each start one."""
    with local.local_cluster(nodes=1, cpus=4) as made:
        yield made


@pytest.fixture
def environment(cluster, tmp_path):
    """A user's, whose home is the test's; `raytf` and `python` are those of this environment."""
    left_out = ("TF_CPP_MIN_LOG_LEVEL", "RAY_ADDRESS", "TF_CONFIG")
    users = {name: value for name, value in os.environ.items() if name not in left_out}
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.path.dirname(sys.executable), users["PATH"]])
    places = os.pathsep.join(filter(None, [str(blocks.ROOT), users.get("PYTHONPATH")]))
    variables = {"HOME": str(tmp_path), "PATH": path, "PYTHONPATH": places, "RAY_ADDRESS": cluster.address}
    return users | cluster.environment | variables


def run_page(page: str, folder: pathlib.Path, environment: dict[str, str]) -> None:
    """Runs the blocks of a page, and fails with the place and the output of the first that does not end well."""
    for number, block in enumerate(blocks.blocks_of(page)):
        if block.title and not block.not_run:
            (folder / block.title).write_text(block.text)
        if not block.runs:
            continue
        if block.language == "python":
            script = folder / f"block_{number}.py"
            script.write_text(block.text)
            command = [sys.executable, str(script)]
        else:
            command = ["bash", "-euo", "pipefail", "-c", "\n".join(blocks.commands(block))]
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=400,
        )
        assert done.returncode == 0, f"{block}\n{done.stdout[-3000:]}\n{done.stderr[-4000:]}"


@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_of_a_page_run(page, environment, tmp_path):
    run_page(page, tmp_path, environment)
