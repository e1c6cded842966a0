"""What runs in the background of the other tests, in processes of its own, and what it finds."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time

from raytf import procfs

ROOT = pathlib.Path(__file__).parents[2]
# Until a group has ended, from the first question on.
_SECONDS = 4000.0


class Behind:
    """Groups of processes (`worker.py`) that run in the background of the tests; `Results` has what they find.

    Attributes:
        folder: of the results.
        started: whether it runs.
    """

    def __init__(self):
        self.folder, self._process = tempfile.mkdtemp(prefix="raytf-tests-"), None

    @property
    def started(self) -> bool:
        return self._process is not None

    def start(self, kinds, ids) -> None:
        """Starts the groups of several kinds.

        Args:
            kinds: {name: function}, of which each gives stages for a folder and tests: lists of groups; one begins when
                all of the one before have ended.
            ids: of the tests that wait for them.
        """
        results = Results(self.folder)
        stages = []
        for name, kind in kinds.items():
            results.of(name).mkdir()
            stages += kind(results.of(name), ids)
        command = [sys.executable, "-m", "tests.processes.worker", *map(json.dumps, stages)]
        environment = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
        with open(results.log, "w") as out:
            self._process = subprocess.Popen(
                command, env=environment, stdout=out, stderr=out, start_new_session=True, cwd=ROOT
            )
        results.pid.write_text(str(self._process.pid))

    def end(self) -> None:
        """Ends what still runs, and removes the results."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)  # one that is killed may end a moment later


class Results:
    """What the processes of a `Behind` leave, perhaps of another process of pytest.

    Args:
        folder: its.
    """

    def __init__(self, folder):
        self._folder = pathlib.Path(folder)
        self.log, self.pid = self._folder / "log", self._folder / "pid"

    def of(self, name) -> pathlib.Path:
        """The folder of a kind."""
        return self._folder / name.replace("/", "_")

    def results(self, folder, name) -> list:
        """What each rank of a group returned for a scenario; waits for the group.

        Raises:
            AssertionError: the group failed, or has not ended in time; it has the logs.
        """
        until = time.monotonic() + _SECONDS
        while not (folder / "codes.json").exists():
            assert time.monotonic() < until, f"{folder.name} has not ended within {_SECONDS} s"
            assert self._runs() or (folder / "codes.json").exists(), self.log.read_text()[-4000:]
            time.sleep(0.1)
        codes = json.loads((folder / "codes.json").read_text())
        logs = [(folder / f"log.{rank}").read_text()[-4000:] for rank in range(len(codes))]
        assert not any(codes.values()), f"exit codes {codes}\n" + "\n".join(logs)
        return [pickle.loads((folder / f"{name}.{rank}.pkl").read_bytes()) for rank in range(len(codes))]

    def _runs(self) -> bool:
        seen = procfs.read_state(int(self.pid.read_text()))
        return seen is not None and seen.state != "Z"
