"""The ring's token reaches a script through its pipe, and is where no other user's process can read it."""

import math
import pathlib

import ray.util

import raytf
from raytf import timeouts
from raytf.collectives import ring_token
from raytf.launch.runner import TaskRunner
from raytf.runtime.settings import Listening
from raytf.runtime.shared_folders import describe_folder

SCRIPT = """
import os, subprocess, sys
from raytf.collectives import ring
from raytf.collectives import ring_token
token = ring_token.token()
print(token.hex(), any(token.hex() in text for text in (*os.environ.values(), *sys.argv)))
for name in ("environ", "cmdline"):
    with open(f"/proc/self/{name}", "rb") as file:
        found = file.read()
    print(token in found or token.hex().encode() in found)
child = "from raytf.collectives import ring_token; print(ring_token.token())"
print(subprocess.run([sys.executable, "-c", child], capture_output=True).stdout)
"""


def test_a_script_gets_the_token_through_its_pipe(tmp_path, monkeypatch):
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    (tmp_path / "script.py").write_text(SCRIPT)
    runner, token = TaskRunner(), ring_token.new_token()
    try:
        runner.reserve(describe_folder(str(tmp_path)), timeouts.get(), Listening((31_920, 31_929)))
        root = str(pathlib.Path(raytf.__file__).parents[1])
        number = runner.start(["script.py"], False, {"PYTHONPATH": root}, token, math.inf)
        events = []
        while not events or events[-1][0] != "exit":
            events += runner.follow(number)
        assert events[-1][1].code == 0, events[-1][1].error
        lines = [text for kind, text in events if kind == "stdout"]
        assert lines == [f"{token.hex()} False", "False", "False", r"b'None\n'"]
    finally:
        runner.stop(1.0)


def test_each_ring_has_a_token_of_its_own():
    assert len({ring_token.new_token() for _ in range(10)}) == 10
    assert all(len(ring_token.new_token()) == ring_token.TOKEN_BYTES for _ in range(2))
