"""What a user sees, to the last line: in a terminal and in a notebook; `test_job_submit.py` has the log of a job."""

from __future__ import annotations

import collections
import contextlib
import io
import json
import os
import pathlib
import pty
import re
import subprocess
import sys
import tempfile

import pytest
import ray

from raytf.console import native_lines
from raytf.runtime.processes import Process
from raytf.train import verify
from tests import blocks

pytestmark = pytest.mark.slow
ROOT = pathlib.Path(__file__).parents[2]
SCRIPTS = pathlib.Path(__file__).with_name("scripts")

NUMBER = r"\d+\.\d+"
EPOCH = rf"epoch {{}}/5  step 20/20  loss {NUMBER}  mae {NUMBER}(  [\d,]+ examples/s)?  \d+% waiting for input"
EPOCH += r"(  \d:\d\d left)?"
FIT = rf"epoch {{}}/5  step 36/36  loss {NUMBER}  mae {NUMBER}  val_loss {NUMBER}  val_mae {NUMBER}"
FIT += r"(  [\d,]+ examples/s)?(  \d+% waiting for input)?(  \d:\d\d left)?"
# What lasts for a second before the first step, or after the last epoch; in a terminal it moves, and goes.
PHASES = (
    "finding or starting Ray|connecting to Ray|looking at the cluster|reading data|trying the model|starting workers"
)
PHASES += "|compiling and making the first step|ending the training"
PHASE = re.compile(rf"({PHASES}) \.\.\.")
# Of the first example, then of the second.
README = [
    *(FIT.format(epoch) for epoch in range(1, 6)),
    r"\[.*\] \[\[.*\]",
    r" \[.*\]",
    r" \[.*\]\]",
    r"run     \S+/runs/sums",
    "train: 1,000 rows, kept in the object store, shuffled",
    *(EPOCH.format(epoch) for epoch in range(1, 6)),
    rf"result  epoch 5  loss {NUMBER}  mae {NUMBER}(  \(best loss {NUMBER} in epoch \d\))?",
    r'model   raytf\.load_model\("\S+/runs/sums"\)',
    rf"\{{'epoch': 5, 'loss': {NUMBER}, 'mae': {NUMBER}\}} <Sequential name=sequential, built=True>",
]


@pytest.fixture
def example(tmp_path):
    return example_of_the_readme(tmp_path)


def example_of_the_readme(folder):
    """The README's first two examples, of raytf.fit and of a KerasTrainer, as a file."""
    examples = [blocks.named("README.md", name).text for name in ("fit", "trainer")]
    assert "raytf.fit(" in examples[0] and "raytf.KerasTrainer(" in examples[1]
    assert all(len(example.strip().splitlines()) <= 17 for example in examples)
    (folder / "example.py").write_text("".join(examples))
    return folder / "example.py"


@pytest.fixture
def environment(tmp_path):
    """A user's, whose home and temporary files are the test's; Ray's folder has a short name, for its sockets."""
    left_out = ("TF_CPP_MIN_LOG_LEVEL", "RAY_ADDRESS", "CI", "NO_COLOR", "FORCE_COLOR")
    users = {k: v for k, v in os.environ.items() if k not in left_out}
    variables = {"HOME": str(tmp_path), "PYTHONPATH": str(ROOT), "COLUMNS": "200", "TERM": "xterm"}
    # a notebook's kernel imports matplotlib, which lists the fonts for each home, and logs it when that takes long
    variables["MPLCONFIGDIR"] = str(pathlib.Path.home() / ".cache" / "matplotlib")
    # next to other tests, which have niceness 0, a run of Ray's 15 has a hundredth of a processor for minutes
    variables["RAY_worker_niceness"] = "0"
    with tempfile.TemporaryDirectory(prefix="raytf", ignore_cleanup_errors=True) as short:
        yield users | variables | {"RAY_TMPDIR": short}


@pytest.fixture
def on_the_common_cluster(environment, ray_cluster):
    """With its token, if it wants one, which may be below the home of the user who runs the tests."""
    token = pathlib.Path.home() / ".ray" / "auth_token"
    variables = {"RAY_AUTH_TOKEN_PATH": str(token)} if token.exists() else {}
    return variables | environment | {"RAY_ADDRESS": ray_cluster.get_runtime_context().gcs_address}


def without_phases(text: str) -> str:
    """What was printed, without the phases that have lasted."""
    return "\n".join(line for line in text.splitlines() if not PHASE.fullmatch(line))


def is_late(line: str) -> bool:
    """Whether it is the line of a comparison that did not end before the training, as on a busy machine."""
    late = verify.NOT_IN_TIME.failed in line or "the comparison is still running" in line
    return line.startswith("raytf: verify: ") and late


def check(lines: list[str], patterns: list[str]) -> None:
    """Every line is what it should be. Phases that last, TensorFlow's first lines and, on a busy machine, a comparison
    of `verify` that the training did not wait for may be between them."""
    lines = [line for line in lines if not (PHASE.fullmatch(line) or native_lines.is_native(line) or is_late(line))]
    matches = [re.fullmatch(pattern, line) is not None for pattern, line in zip(patterns, lines, strict=False)]
    assert len(lines) == len(patterns) and all(matches), "\n".join(lines)


def in_a_terminal(command, environment, folder) -> str:
    """What a command writes to a terminal of its own."""
    written = bytearray()
    main, terminal = pty.openpty()
    with subprocess.Popen(command, cwd=folder, env=environment, stdin=terminal, stdout=terminal, stderr=terminal) as p:
        os.close(terminal)
        try:
            while text := os.read(main, 1 << 16):
                written += text
        except OSError:  # Linux raises it when the last process has closed the terminal
            pass
        finally:
            os.close(main)
    assert p.returncode == 0, written.decode()
    return written.decode()


def screen(written: str) -> tuple[list[str], set[str]]:
    """(the lines that a terminal shows at the end, those that it showed for a while)."""
    rows, gone = collections.defaultdict(str), set()
    row = column = 0
    for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", written):
        if part == "\n":
            row += 1
        elif part == "\r":
            column = 0
        elif part == "\x1b[2K":
            gone.add(rows[row])
            rows[row] = ""
        elif part == "\x1b[1A":
            row -= 1
        elif part.startswith("\x1b"):
            assert part[-1] in "mlh", f"a code that this does not know: {part!r}"
        else:
            rows[row] = rows[row][:column].ljust(column) + part + rows[row][column + len(part) :]
            column += len(part)
    return [rows[i] for i in range(max(rows) + 1) if rows[i]], gone - {""}


def test_the_example_in_a_terminal(example, environment):
    """Ray is started by it, on this machine, and its workers start from scratch."""
    shown, gone = screen(in_a_terminal([sys.executable, str(example)], environment, example.parent))
    check(shown, README)
    moving = re.compile(rf". ({PHASES}) \.\.\.( \d+ s)?|epoch \d/5  step \d+/\d+  loss .*")
    unlike = [line for line in gone if not (moving.fullmatch(line) or native_lines.is_native(line))]
    assert not unlike, unlike


def test_the_example_in_a_notebook(example, on_the_common_cluster):
    command = [sys.executable, SCRIPTS / "notebook.py", example]
    place = {"cwd": example.parent, "env": on_the_common_cluster}
    done = subprocess.run(command, **place, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    outputs = json.loads(done.stdout)
    rays = re.compile("IProgress not found|import tqdm as notebook_tqdm|packages: .'ipywidgets'")  # of its data, first
    lines = "".join(text for _, stream, text in outputs if stream == "stderr").splitlines()
    known = lambda line: native_lines.is_native(line) or is_late(line) or rays.search(line)
    assert not [line for line in lines if line.strip() and not known(line)], lines
    assert {kind for kind, _, _ in outputs} == {"stream"}, outputs
    check("".join(text for _, stream, text in outputs if stream == "stdout").splitlines(), README)


def test_what_workers_print_is_shown_once_each_and_warnings_once_in_all(on_the_common_cluster, tmp_path):
    command = [sys.executable, SCRIPTS / "own_prints.py"]
    place = {"cwd": tmp_path, "env": on_the_common_cluster}
    done = subprocess.run(command, **place, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    expected = [
        rf"\[worker {i}\] {text}" for i in (0, 1) for text in ("the same of both", f"this is rank {i}", f"end of {i}")
    ]
    lines = [rf"epoch {epoch}/2  step 2/2  loss {NUMBER}(  \d:\d\d left)?" for epoch in (1, 2)]
    lines += [rf"\[worker 0\] 2/2 - \d+s - \d+\w+/step - loss: {NUMBER}", r"run     /\S+/tensorflow_\S+", "done"]
    check_in_any_order(done.stdout, [*expected, *lines])
    warned = [rf"\[worker \d\] .*own_prints.py:\d+: UserWarning: {text}" for text in ("be careful", "only here")]
    logged = [
        "be careful, too",
        "WARNING:tensorflow:a warning of TensorFlow's",
        "of two lines",
        *[r"  warnings\.warn.*"] * 2,
    ]
    check_in_any_order(done.stderr, [*warned, *(rf"\[worker \d\] {text}" for text in logged)])


def test_a_process_that_is_a_worker_before_it_has_imported_is_shown_as_one(ray_cluster):
    """The driver asks it for the import, and the controller makes it a worker: either call may come first."""

    def names(before):
        from raytf.console import output
        from raytf.train import entry

        if before:
            output.set_output_name("worker 1")
        with contextlib.redirect_stdout(io.StringIO()) as captured, contextlib.redirect_stderr(io.StringIO()):
            entry.import_raytf()
        return re.findall("raytf (.*)", captured.getvalue())

    process = ray.remote(num_cpus=0)(Process).remote()
    asked = [process.execute.remote(names, before) for before in (False, False, True)]
    assert ray.get(asked, timeout=120) == [["model check"], [], []]


def check_in_any_order(text: str, patterns: list[str]) -> None:
    """A line for each pattern, and no other but phases that last."""
    lines = [line for line in text.splitlines() if not PHASE.fullmatch(line)]
    counts = [sum(re.fullmatch(pattern, line) is not None for line in lines) for pattern in patterns]
    assert counts == [patterns.count(pattern) for pattern in patterns] and len(lines) == len(patterns), text
