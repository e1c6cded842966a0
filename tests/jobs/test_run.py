"""`raytf run`: scripts as their users wrote them, each on real processes."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest
import ray

from raytf.launch import launcher
from raytf.runtime import hangs
from tests.jobs.tfjobs import REPLICA, TFJOB
from tests.waiting import until

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.slow]
SCRIPTS = pathlib.Path(__file__).parent / "scripts"
_started: list[subprocess.Popen] = []


def start(*arguments, cwd=SCRIPTS):
    """Starts `raytf run` on the test session's cluster."""
    command = ["-m", "raytf.cli", "run", "--address", ray.get_runtime_context().gcs_address, *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    _started.append(subprocess.Popen([sys.executable, *command], cwd=cwd, text=True, **pipes))
    return _started[-1]


@pytest.fixture(autouse=True)
def none_stays(gives_back):
    """Ends what a test that failed has started: the next one would see its processes, and wait for its CPUs."""
    yield
    while _started:
        process = _started.pop()
        process.kill()
        process.wait()


def run(*arguments, code=0, cwd=SCRIPTS):
    """`start`, to its end: what it printed."""
    process = start(*arguments, cwd=cwd)
    try:
        out, err = process.communicate(timeout=200)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == code, f"exit code {process.returncode}\n{out[-3000:]}\n{err[-5000:]}"
    assert not left(), "processes outlive the command"
    return out, err


def left():
    """Processes of scripts that still run on this Ray."""
    (raylet,) = [p.pid for p in psutil.Process().children() if p.name() == "raylet"]
    found = []
    for process in psutil.process_iter(["cmdline"]):
        with contextlib.suppress(psutil.Error):
            line = process.info["cmdline"] or []
            if " ".join(line).split() == ["raytf.launch.bootstrap", str(raylet)]:  # a fork
                found.append(process)
            elif "raytf.launch.bootstrap" in line:
                found += [process] * (process.environ().get("RAY_RAYLET_PID") == str(raylet))
    return found


def test_mirrored_devices():
    out, _ = run("mirrored_mlp.py")
    assert "[worker 0] replicas: 2" in out
    assert float(re.search(r"\] accuracy: ([\d.]+)", out)[1]) > 0.8


def test_fit_with_callbacks(tmp_path):
    """Prefixes, the same weights on all workers, files by the chief, options of the script after its name."""
    out, _ = run("--num-workers", 2, "--chief", "multi_worker_cnn.py", "--epochs", 5, "--output", tmp_path)
    ends = re.findall(r"^\[(chief 0|worker 0)\] +epochs: (\d) weights: (\S+)", out, re.MULTILINE)
    # nothing gets better by 10, so that EarlyStopping ends the run after epoch 3
    assert len(ends) == 2 and ends[0][1] == "3" and ends[0][1:] == ends[1][1:]
    rates = re.findall(r"\[chief 0\] +learning rate of epoch \d: (\S+)", out)
    assert rates == ["0.010000", "0.005000", "0.002500"]
    assert (tmp_path / "best.keras").exists() and os.listdir(tmp_path / "logs" / "train")


def test_sequences_of_varying_length():
    out, _ = run("--num-workers", 2, "--quiet", "lstm_lengths.py")
    assert "[worker 0] loss fell: True" in out and "worker 1" not in out


def test_mixed_precision():
    out, _ = run("--num-workers", 2, "mixed_precision.py")
    assert "policy: float16 scaled: LossScaleOptimizer" in out and "loss fell: True" in out


def test_frozen_and_unfrozen_layers():
    out, _ = run("--num-workers", 2, "--module", "transfer")
    assert out.count("frozen stayed: True") == out.count("unfrozen changed: True") == 2


def test_restart_resumes_from_the_scripts_checkpoint(tmp_path):
    arguments = ("checkpoint_manager.py", "--output", tmp_path, "--fail-at", 2)
    out, err = run("--num-workers", 2, "--max-restarts", 1, *arguments)
    assert "failed first: exit code 7" in err and "restart 1 of 1: all tasks" in err
    assert "[worker 1] restored epoch 2 iterations 8" in out
    assert re.findall(r"\[worker 0\] epoch (\d)", out) == ["1", "2", "3", "4"]


def test_parameter_servers_end_with_the_chief():
    out, _ = run("--num-workers", 2, "--num-ps", 1, "parameter_server.py")
    assert re.search(r"\[ps 0\] +serving", out) and "[worker 1] serving" in out
    losses = [float(x) for x in re.findall(r"\[chief 0\] +epoch \d: loss (\S+)", out)]
    assert len(losses) == 3 and losses[-1] < losses[0] / 10
    assert "/job:ps" in out


COMMAND = """\
              command: [python, %s]
              args: [%s]
              env: [{name: SHADE, value: of %s}]
              volumeMounts: [{mountPath: /train, name: training}]
          volumes: [{name: training, persistentVolumeClaim: {claimName: v}}]
"""


def test_a_tfjob_of_workers(tmp_path):
    """Runs its command as written, with the output where the volume would be; what is not honoured is named."""
    script = SCRIPTS / "multi_worker_cnn.py"
    arguments = f"--epochs, '1', --output, {tmp_path}"
    (tmp_path / "job.yaml").write_text(TFJOB + REPLICA % ("Worker", 2) + COMMAND % (script, arguments, "workers"))
    out, err = run("--tfjob", tmp_path / "job.yaml")
    ends = re.findall(r"^\[worker (\d)\] +epochs: 1 weights: (\S+)", out, re.MULTILINE)
    assert sorted(rank for rank, _ in ends) == ["0", "1"] and len({weights for _, weights in ends}) == 1
    assert "raytf: --tfjob: image of worker is not honoured" in err
    assert "volumes of worker is not honoured: mount on Ray's nodes what the script opens" in err


def test_a_tfjob_with_parameter_servers(tmp_path):
    script = SCRIPTS / "parameter_server.py"
    replicas = [REPLICA % (role, 1) + COMMAND % (script, "", role) for role in ("Chief", "PS", "Worker")]
    (tmp_path / "job.yaml").write_text(TFJOB + "".join(replicas))
    out, _ = run("--tfjob", tmp_path / "job.yaml")
    assert re.search(r"\[ps 0\] +serving", out) and "[worker 0] serving" in out
    losses = [float(x) for x in re.findall(r"\[chief 0\] +epoch \d: loss (\S+)", out)]
    assert len(losses) == 3 and losses[-1] < losses[0] / 10


def test_one_worker_fails_and_is_named():
    began = time.monotonic()
    _, err = run("--num-workers", 2, "one_fails.py", code=1)
    lines = re.findall("^raytf: (?:worker|restart) .*", err, re.MULTILINE)
    assert len(lines) == 1 and "worker 1 failed first: exit code 1" in lines[0]
    assert "batch is too large on this worker" in err and time.monotonic() - began < 120


ENDS_EARLY = """
import json, os, sys
import numpy as np, tensorflow as tf
strategy = tf.distribute.MultiWorkerMirroredStrategy()
rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]

@tf.function
def step():
    def replica():
        return tf.distribute.get_replica_context().all_reduce("sum", tf.ones([]))
    return strategy.run(replica)

for i in range(10):
    step()
    if i == 4 and rank == 1:
        print("enough")
        sys.exit(0)
print("done")
"""


def test_a_worker_that_ends_while_others_wait(tmp_path):
    (tmp_path / "early.py").write_text(ENDS_EARLY)
    out, err = run("--num-workers", 2, "early.py", code=1, cwd=tmp_path)
    assert "[worker 1] enough" in out and "done" not in out
    assert "worker 1 ended while others continued; every worker must make the same number of steps" in err


DEADLOCK = """
import json, os, threading
import keras, numpy as np, tensorflow as tf
strategy = tf.distribute.MultiWorkerMirroredStrategy()
rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]

class Mine(keras.callbacks.Callback):
    raytf_local_batches = True

    def on_train_batch_end(self, batch, logs=None):
        if rank == 1 and batch == 5:
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()

with strategy.scope():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
model.fit(np.ones((160, 1)), np.ones((160, 1)), batch_size=16, callbacks=[Mine()], verbose=0)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_every_process(tmp_path, number):
    (tmp_path / "forever.py").write_text(
        "import subprocess, sys, threading\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1e6)', 'raytf.launch.bootstrap'])\n"
        "print('waiting')\nthreading.Event().wait()\n"
    )
    process = start("--num-workers", 2, "forever.py", cwd=tmp_path)
    seen = [process.stdout.readline() for _ in range(2)]
    assert all("waiting" in line for line in seen)
    until(lambda: len(left()) == 4)  # a command line can be read a moment after its process has begun
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number and f"stopped by {number.name}" in err
    assert not left()


def test_a_driver_that_is_killed_leaves_nothing(tmp_path):
    (tmp_path / "forever.py").write_text("import threading\nprint('waiting')\nthreading.Event().wait()\n")
    process = start("forever.py", cwd=tmp_path)
    assert "waiting" in process.stdout.readline() and left()
    process.kill()
    process.communicate()
    psutil.wait_procs(left(), timeout=60)
    assert not left()


@pytest.mark.skipif(os.geteuid() != 0, reason="a folder that other processes do not see needs root")
def test_the_folder_travels(tmp_path):
    """Processes that do not see the current folder run in a copy, with the modules of the script's folder."""
    (tmp_path / "beside.py").write_text("NAME = 'beside the script'\n")
    (tmp_path / "main.py").write_text("import os, beside\nprint(beside.NAME, 'in', os.getcwd())\n")
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    address = ray.get_runtime_context().gcs_address
    shell = f"mount -t tmpfs none {hidden} && cp {tmp_path}/*.py {hidden} && cd {hidden} && "
    shell += f"exec {sys.executable} -m raytf.cli run --address {address} main.py"
    done = subprocess.run(["unshare", "-m", "sh", "-c", shell], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.search(r"\[worker 0\] beside the script in (\S+)", done.stdout)[1]
    assert found != str(hidden) and "working_dir" in found
    pattern = rf"^raytf: \S+ does not see the current folder; the script runs there in a copy, {found}, and what it"
    assert len(re.findall(pattern, done.stderr, re.MULTILINE)) == 1


def run_locally(folder, text, *, monkeypatch, **options):
    """Runs a script in this process, as `run` does in one of its own; the exit code."""
    (folder / "script.py").write_text(text)
    monkeypatch.chdir(folder)
    spec = launcher.LaunchSpec(script="script.py", **options)
    launcher.connect_cluster(spec)
    code = launcher.launch_script(spec)
    _, alive = psutil.wait_procs(left(), timeout=30)
    assert not alive, "processes outlive the run"
    return code


def test_a_script_that_hangs_is_named_with_its_stack(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(hangs, "_ENDS_SLOW", 6.0)  # times the limit
    options = {"num_workers": 2, "hang_timeout": 2.0}
    assert run_locally(tmp_path, DEADLOCK, monkeypatch=monkeypatch, **options) == 128 + signal.SIGKILL
    err = capfd.readouterr().err
    named = r"its process \d+ on \S+ is in Mine.on_train_batch_end after step 6 since \d+ s; "
    named += r"(worker 0|the run) waits for it since"
    at_first = named.replace(
        "in Mine.on_train_batch_end", r"(in Mine.on_train_batch_end|between two steps,)"
    )  # reported late
    assert re.search(rf"raytf: Hang: the other workers wait for worker 1: {at_first} step 7", err)
    assert "lock.acquire()" in err and re.search(rf"raytf: worker 1 failed first: hangs: {named}", err)


def test_stopped_process_is_named_and_the_restart_resumes(tmp_path, monkeypatch, capfd):
    """A stop that ends in time is none: worker 0 stops, too, and its child resumes it."""
    text = """
import json, os, signal, subprocess
rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
if rank == 0 and not os.path.exists("stopped0"):
    me = os.getpid()
    stopped = f"grep -qs '^State:.T' /proc/{me}/status"
    subprocess.Popen(["sh", "-c", f"until {stopped}; do sleep 0.1; done; sleep 1; kill -CONT {me}"])
if not os.path.exists(f"stopped{rank}"):
    open(f"stopped{rank}", "w").close()
    os.kill(os.getpid(), signal.SIGSTOP)
print("went on", flush=True)
if rank == 0 and not os.path.exists("again"):
    open("again", "w").close()
    signal.pause()
"""
    options = {"num_workers": 2, "max_restarts": 1, "frozen_after": 6.0}
    assert run_locally(tmp_path, text, monkeypatch=monkeypatch, **options) == 0
    out, err = capfd.readouterr()
    assert [out.count(f"[worker {rank}] went on") for rank in (0, 1)] == [2, 1]
    lines = re.findall("^raytf: (?:worker|restart) .*", err, re.MULTILINE)
    assert re.fullmatch(
        r"raytf: worker 1 failed first: frozen: its process \d+ on \S+ is stopped by .* s \(--frozen-after.*",
        lines[0],
    )
    assert lines[1:] == ["raytf: restart 1 of 1: all tasks start again, as worker 1 failed"]


def test_a_runner_that_gives_no_answer_has_gone(tmp_path, monkeypatch, capfd, set_timeouts):
    """Ray's own process is stopped, as if its host were: the others end, and so does it."""
    set_timeouts(host_silent=6.0)  # a busy machine answers late
    text = """
import json, os, signal
if json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 1:
    os.kill(os.getppid(), signal.SIGSTOP)
signal.pause()
"""
    assert run_locally(tmp_path, text, monkeypatch=monkeypatch, num_workers=2) == 128 + signal.SIGKILL
    err = capfd.readouterr().err
    assert re.search(r"worker 1 failed first: timeout: its host \S+, or Ray's process there, does not answer", err)


def test_evaluator_output_is_printed_to_its_last_line(tmp_path, monkeypatch, set_timeouts, capfd):
    """Also what it prints when it is stopped, long after the training."""
    set_timeouts(last_evaluation=1.0)
    text = """
import json, os, signal, sys, time
def end(*_):
    print("\\n".join(f"line {i}" for i in range(20_000)), flush=True)
    sys.exit(0)
if json.loads(os.environ["TF_CONFIG"])["task"]["type"] == "evaluator":
    signal.signal(signal.SIGTERM, end)
    open("ready", "w").close()
    signal.pause()
while not os.path.exists("ready"):
    time.sleep(0.01)
"""
    assert run_locally(tmp_path, text, monkeypatch=monkeypatch, evaluator=True) == 0
    out, err = capfd.readouterr()
    assert re.findall(r"^\[evaluator 0\] line (\d+)$", out, re.MULTILINE) == [str(i) for i in range(20_000)]
    assert "evaluator 0 is ended, 1 s after the training" in err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["nowhere.py"], "The script must be a file that exists; received: 'nowhere.py'"),
        (["--module", "nowhere"], "a module that can be imported from the current folder"),
        (["--num-workers", 0, "one_fails.py"], "num_workers must be an integer of at least 1"),
        (["--num-workers", 2, "--num-ps", 1, "--chief", "one_fails.py"], "Leave the chief out"),
        (["--num-workers", 40, "one_fails.py"], "The cluster must be able to hold 40 tasks (40 CPU)"),
        (["--env", "RAYTF_NOT_SET", "one_fails.py"], "the NAME of a variable that is set"),
        (["--max-restarts", -1, "one_fails.py"], "max_restarts must be an integer of at least 0"),
    ],
)
def test_wrong_calls_fail_with_the_reason(arguments, message):
    _, err = run(*arguments, code=2)
    assert message in err and "Traceback" not in err


def test_variables_arguments_and_exit_code(tmp_path):
    """What a script sees around it; --legacy-keras gives Keras 2."""
    (tmp_path / "look.py").write_text(
        "import os, sys\nimport tensorflow as tf\n"
        "print(tf.keras.layers.Dense.__module__, os.environ['COLOR'], sys.argv[1:])\n"
        "print(os.getcwd())\nsys.exit(5)\n"
    )
    command = ["--legacy-keras", "--env", "COLOR=green", "look.py", "--num-workers", "-x"]
    out, err = run(*command, code=5, cwd=tmp_path)
    assert re.search(r"tf_keras\S* green \['--num-workers', '-x'\]", out) and str(tmp_path) in out
    assert "worker 0 failed first: exit code 5" in err
