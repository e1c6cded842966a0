"""What `raytf run --tfjob` reads from a TFJob: roles, commands and variables; what it names, and what it refuses."""

from __future__ import annotations

import copy
import json
import pathlib
import re
import shlex
import subprocess
import sys
from fractions import Fraction

import pytest
import yaml
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from raytf.cli import main
from raytf.errors import ConfigError
from raytf.launch import tfjob
from raytf.launch.spec import LaunchSpec
from raytf.runtime import roles


def replica(count=1, **container):
    """A replica as the samples of the training operator have it."""
    container = {"name": "tensorflow", "image": "kubeflow/sample:latest", **container}
    return {"replicas": count, "restartPolicy": "Never", "template": {"spec": {"containers": [container]}}}


def job(**replicas):
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "TFJob",
        "metadata": {"name": "mnist", "namespace": "kubeflow"},
        "spec": {"runPolicy": {"cleanPodPolicy": "None"}, "tfReplicaSpecs": replicas},
    }


@pytest.fixture
def read(tmp_path, monkeypatch):
    """Reads a TFJob in a folder with a script; (LaunchSpec, what is not honoured)."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mnist.py").write_text("print()\n")
    (tmp_path / "other.py").write_text("print()\n")

    def reading(made, *arguments, **variables):
        (tmp_path / "job.yaml").write_text(yaml.safe_dump_all(made if isinstance(made, list) else [made]))
        options, messages = tfjob.read_tfjob("job.yaml", *(arguments[:1] or [None]), arguments[1:], variables)
        return LaunchSpec(**options), messages

    return reading


def configs(spec):
    """TF_CONFIG of each task, with addresses by name."""
    made = roles.environment({task: f"{task.role}-{task.index}:2222" for task in spec.tasks()})
    return {str(task): json.loads(text) for task, text in made.items()}


COMMAND = ["python", "mnist.py", "--log_dir=/train/logs", "--batch_size=150"]


def test_a_multi_worker_job_with_volumes(read):
    """The shape of the samples mnist_with_summaries and multi-worker: workers alone, a volume, a GPU each."""
    worker = replica(2, command=COMMAND, volumeMounts=[{"mountPath": "/train", "name": "training"}])
    worker["template"]["spec"]["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": 1, "memory": "4Gi"}}
    worker["template"]["spec"]["volumes"] = [{"name": "training", "persistentVolumeClaim": {"claimName": "v"}}]
    spec, messages = read([{"kind": "PersistentVolumeClaim", "apiVersion": "v1"}, job(Worker=worker)])
    assert (spec.script, spec.num_workers, spec.num_ps, spec.chief, spec.max_restarts) == ("mnist.py", 2, 0, False, 0)
    cluster = {"worker": ["worker-0:2222", "worker-1:2222"]}
    assert configs(spec)["worker 1"] == {"cluster": cluster, "task": {"type": "worker", "index": 1}}
    task = spec.tasks()[0]
    assert spec.arguments_of(task) == ("--log_dir=/train/logs", "--batch_size=150")
    assert spec.bundle(task) == {"CPU": 1, "GPU": 1} and "CUDA_VISIBLE_DEVICES" not in spec.variables(task)
    fields = [sentence.split()[1] for sentence in messages]
    assert fields == ["cleanPodPolicy", "image", "memory", "volumeMounts", "volumes"]
    assert messages[-1] == "--tfjob: volumes of worker is not honoured: mount on Ray's nodes what the script opens"


def test_parameter_servers_with_an_image_that_has_an_entrypoint(read):
    """The shape of the sample dist-mnist: no command, so that the script is named; each role has its own args."""
    ps = replica(1, args=["--fake_data"], resources={"requests": {"cpu": "500m"}})
    made = job(Chief=replica(args=["--epochs=2"]), PS=ps, Worker=replica(2))
    spec, _ = read(made, "mnist.py", "--data_path", "x")
    assert (spec.num_workers, spec.num_ps, spec.chief) == (2, 1, False)
    assert set(configs(spec)) == {"chief 0", "worker 0", "worker 1", "ps 0"}
    assert set(configs(spec)["ps 0"]["cluster"]) == {"chief", "worker", "ps"}
    arguments = {str(task): spec.arguments_of(task) for task in spec.tasks()}
    assert arguments["chief 0"] == ("--data_path", "x", "--epochs=2")
    assert arguments["ps 0"] == ("--data_path", "x", "--fake_data") and arguments["worker 1"] == ("--data_path", "x")
    assert [spec.bundle(task)["CPU"] for task in spec.tasks()] == [1, 1, 1, 0.5]
    with pytest.raises(ConfigError, match="does not say what its image runs; received: no command of chief"):
        read(made)


def test_chief_is_one_of_the_workers_and_an_evaluator_is_extra(read):
    made = job(Master=replica(command=COMMAND), worker=replica(3, command=COMMAND), Evaluator=replica(command=COMMAND))
    spec, _ = read(made)
    assert (spec.num_workers, spec.chief, spec.evaluator) == (4, True, True)
    found = configs(spec)
    assert set(found) == {"chief 0", "worker 0", "worker 1", "worker 2", "evaluator 0"}
    assert "evaluator" not in found["evaluator 0"]["cluster"]


def test_variables_reach_the_processes_and_the_words_of_the_command(read):
    env = [
        {"name": "COLOR", "value": "green"},
        {"name": "SHADE", "value": "dark $(COLOR), $(LATER)"},
        {"name": "LATER", "value": "x"},
        {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
    ]
    command = ["/usr/bin/python3", "-u", "mnist.py"]
    spec, messages = read(job(Worker=replica(command=command, args=["$(COLOR)", "$(KEY)", "$$(COLOR)"], env=env)))
    (task,) = spec.tasks()
    assert spec.variables(task)["COLOR"] == "green" and "KEY" not in spec.variables(task)
    assert spec.arguments_of(task) == ("green", "$(KEY)", "$(COLOR)")
    assert "--tfjob: valueFrom of KEY of worker is not honoured: set them by --env NAME=VALUE" in messages
    assert spec.variables(task)["SHADE"] == "dark green, $(LATER)"
    spec, messages = read(
        job(Worker=replica(command=command, args=["$(COLOR)", "$(KEY)"], env=env)), KEY="k", COLOR="red"
    )
    assert spec.arguments_of(spec.tasks()[0]) == ("red", "k") and "valueFrom" not in "\n".join(messages)


def test_parameter_servers_without_a_chief(read):
    """The sample dist-mnist has PS and Worker: there worker 0 is the master."""
    spec, messages = read(job(PS=replica(2, args=["--fake_data"]), Worker=replica(4)), "mnist.py")
    assert set(configs(spec)) == {"chief 0", "worker 0", "worker 1", "worker 2", "ps 0", "ps 1"}
    assert messages[0] == "--tfjob: without a Chief, worker 0 is the chief, which coordinates the parameter servers"


def test_what_a_command_loses_is_named(read):
    made = job(Worker=replica(command=["bash", "-c", "pip install x && python s.py --epochs 5"]))
    made["spec"]["tfReplicaSpecs"]["Worker"]["template"]["metadata"] = {"labels": {}}
    spec, messages = read(made, "mnist.py")
    assert spec.arguments_of(spec.tasks()[0]) == ()
    assert any("command of worker is not honoured: mnist.py runs in its place" in text for text in messages)
    assert "--tfjob: metadata of template of worker is not honoured: it is of Kubernetes' pods alone" in messages
    spec, messages = read(job(Worker=replica(command=["python", "-u", "-W", "ignore", "-Xdev", "mnist.py"])))
    assert spec.script == "mnist.py" and [text.split(" is ")[0] for text in messages if "python" in text] == [
        "--tfjob: python's -W ignore of worker",
        "--tfjob: python's -Xdev of worker",
    ]


def test_the_page_names_what_replaces_a_field():
    """Those with a line of their own, and those of pods that jobs often have."""
    pods = "securityContext serviceAccountName imagePullSecrets hostNetwork lifecycle terminationGracePeriodSeconds"
    page = (pathlib.Path(tfjob.__file__).parents[2] / "docs" / "migrate" / "tfjob.md").read_text()
    table = "\n".join(line for line in page.splitlines() if line.startswith("| "))
    assert {*tfjob._WHY, *pods.split(), "metadata", "probes", "TF_CONFIG"} - {"sidecars"} <= set(
        re.findall(r"\w+", table)
    )
    assert "`restartPolicy: Never` of one role" in table


def test_args_of_an_image_without_an_entrypoint(read):
    spec, _ = read(job(Worker=replica(args=["python", "mnist.py", "--b"])))
    assert spec.script == "mnist.py" and spec.arguments_of(spec.tasks()[0]) == ("--b",)


@pytest.mark.parametrize(
    "text", ["exec", "exec -a x python mnist.py", "python mnist.py \\\\\nrm x", "python mnist.py #\\\n"]
)
def test_a_command_that_needs_a_shell_is_refused(read, text):
    with pytest.raises(ConfigError, match="starts a Python script or module"):
        read(job(Worker=replica(command=["sh", "-c", text])))


def test_no_replicas_of_a_role_are_none(read):
    made = job(
        Chief=replica(command=COMMAND), Worker=replica(0, command=["./train"]), PS=replica(0), Evaluator=replica(0)
    )
    spec, messages = read(made)
    assert configs(spec) == {"chief 0": {"cluster": {"chief": ["chief-0:2222"]}, "task": {"type": "chief", "index": 0}}}
    assert not any("worker" in text for text in messages)


def test_restarts_of_the_first_versions(read):
    made = job(Worker=replica(command=COMMAND) | {"restartPolicy": "OnFailure"})
    made["spec"]["backoffLimit"] = 5
    assert read(made)[0].max_restarts == 5


WORDS = ('{"a": [1, 2]}', "#~", "a~b#c")


@pytest.mark.parametrize(
    "command, script, arguments",
    [
        (["python", "-m", "json.tool", "-h"], ("json.tool", True), ("-h",)),
        (["sh", "-c", "python3.11 mnist.py --name 'a b'"], ("mnist.py", False), ("--name", "a b")),
        (["sh", "-c", """python mnist.py '{"a": [1, 2]}' "#~" a~b#c"""], ("mnist.py", False), WORDS),
        (["./mnist.py", "-x"], ("./mnist.py", False), ("-x",)),
        (["sh", "-c", "python mnist.py \\\n  --a \\\n  --lr=\\\n0.1\n"], ("mnist.py", False), ("--a", "--lr=0.1")),
        (["sh", "-c", "exec python mnist.py -x"], ("mnist.py", False), ("-x",)),
        (["sh", "-c", "exec \\\npython mnist.py"], ("mnist.py", False), ()),
        (["sh", "-c", "python mnist.py \"it's \\\nx\" 'a\"b'"], ("mnist.py", False), ("it's x", 'a"b')),
        (["sh", "-c", "python mnist.py 'a\\\nb' c\\\\"], ("mnist.py", False), ("a\\\nb", "c\\")),
    ],
)
def test_commands(read, command, script, arguments):
    spec, _ = read(job(Worker=replica(command=command)))
    assert (spec.script, spec.module) == script and spec.arguments_of(spec.tasks()[0]) == arguments


def test_script_on_the_command_line_replaces_the_containers(read):
    spec, _ = read(
        job(Worker=replica(command=["python", "/var/tf_mnist/mnist.py", "--steps=3"])), "other.py", "--first"
    )
    assert spec.script == "other.py" and spec.arguments_of(spec.tasks()[0]) == ("--first", "--steps=3")


@pytest.mark.parametrize(
    "policy, limit, restarts, message",
    [
        ("Never", 5, 0, ""),
        ("OnFailure", 5, 5, ""),
        ("Always", None, 3, "restartPolicy without backoffLimit is not honoured: 3 restarts at most"),
        ("ExitCode", 1, 1, "restartPolicy ExitCode is not honoured: every failure is restarted"),
    ],
)
def test_restarts(read, policy, limit, restarts, message):
    made = job(Worker=replica(command=COMMAND) | {"restartPolicy": policy})
    if limit is not None:
        made["spec"]["runPolicy"]["backoffLimit"] = limit
    spec, messages = read(made)
    assert spec.max_restarts == restarts and message in "\n".join(messages)


def test_policies_that_do_not_hold_are_named(read):
    made = job(Chief=replica(command=COMMAND), PS=replica(command=COMMAND), Worker=replica(command=COMMAND))
    made["spec"]["tfReplicaSpecs"]["Worker"]["restartPolicy"] = "OnFailure"
    made["spec"]["successPolicy"] = "AllWorkers"
    spec, messages = read(made)
    never = "every failure is restarted, as other roles ask for restarts"
    assert spec.max_restarts == 3 and f"--tfjob: restartPolicy Never of chief, ps is not honoured: {never}" in messages
    with_chief = "with parameter servers the run ends with the chief"
    assert f"--tfjob: successPolicy AllWorkers is not honoured: {with_chief}" in messages


def test_tf_config_of_the_yaml_does_not_replace_that_of_the_run(read):
    env = [{"name": "TF_CONFIG", "value": "{}"}, {"name": "A", "value": "b"}]
    spec, messages = read(job(Worker=replica(command=COMMAND, env=env)))
    variables = spec.variables(spec.tasks()[0])
    assert "TF_CONFIG" not in variables and variables["A"] == "b"
    assert "--tfjob: TF_CONFIG in env of worker is not honoured: raytf sets it for each process" in messages


def test_null_is_absent(read):
    container = {"command": COMMAND, "env": [{"name": "A", "value": None, "valueFrom": None}], "workingDir": None}
    container["resources"] = {"limits": {"cpu": None, "nvidia.com/gpu": None}}
    spec, messages = read(job(Worker=replica(None, **container) | {"restartPolicy": None}))
    (task,) = spec.tasks()
    assert spec.max_restarts == 0 and spec.variables(task)["A"] == "" and spec.bundle(task) == {"CPU": 1}
    assert "workingDir" not in "".join(messages)


@pytest.mark.parametrize(
    "amount, cpus",
    [
        ("1k", 1000),
        ("1e1", 10),
        (10.0, 10),
        ("+2", 2),
        ("2.", 2),
        (".5", 0.5),
        ("1E-1", 0.1),
        ("2Ki", 2048),
        ("2007m", 2.007),
        ("0.1m", 0.001),
    ],
)
def test_quantities_of_cpus(read, amount, cpus):
    spec, _ = read(job(Worker=replica(command=COMMAND, resources={"limits": {"cpu": amount}})))
    assert spec.bundle(spec.tasks()[0]) == {"CPU": cpus}


def test_no_cpus_are_the_default(read):
    spec, messages = read(job(Worker=replica(command=COMMAND, resources={"requests": {"cpu": 0}})))
    assert spec.bundle(spec.tasks()[0]) == {"CPU": 1}
    assert "--tfjob: cpu 0 of worker is not honoured: a process has 1 CPU" in messages


def test_gpus_of_amd_are_rays_gpus(read):
    limits = {"amd.com/gpu": "2", "google.com/tpu": 0, "rdma/hca": 1}
    spec, messages = read(job(Worker=replica(command=COMMAND, resources={"limits": limits})))
    assert spec.bundle(spec.tasks()[0]) == {"CPU": 1, "GPU": 2}
    assert "--tfjob: rdma/hca of worker is not honoured: Ray's nodes must have it" in messages


# The grammar of k8s.io/apimachinery/pkg/api/resource: numbers, then a suffix or an exponent.
NUMBERS = st.from_regex(r"[+]?([0-9]{1,6}|[0-9]{1,4}\.[0-9]{0,4}|\.[0-9]{1,4})", fullmatch=True)
FACTORS = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
SUFFIXES = {
    **{suffix: Fraction(10) ** power for suffix, power in FACTORS.items()},
    **{f"{letter}i": Fraction(2) ** (10 * (1 + power)) for power, letter in enumerate("KMGTPE")},
    **{f"{sign}{power}": Fraction(10) ** power for sign in "eE" for power in range(-9, 13)},
    "e+3": Fraction(1000),
}


@given(NUMBERS, st.sampled_from(sorted(SUFFIXES)))
def test_a_quantity_is_what_kubernetes_reads(number, suffix):
    expected = Fraction(f"0{number.lstrip('+')}0" if "." in number else number) * SUFFIXES[suffix]
    assert tfjob._quantity("worker", "memory", number + suffix) == pytest.approx(float(expected), rel=1e-15)


# As ParseQuantity splits a text, without the values.
QUANTITY = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([numkMGTPE]|[KMGTPE]i|[eE][+-]?\d+)?", re.ASCII)


@given(st.text("0123.+-eEkKmMinG _", max_size=7))
def test_only_quantities_are_taken(text):
    try:
        amount = tfjob._quantity("worker", "memory", text)
    except ConfigError as error:
        assert not QUANTITY.fullmatch(text) or "at least 0" in str(error) or "quantity" in str(error)
        if QUANTITY.fullmatch(text):
            assert text.startswith("-") or "e" in text.lower()  # negative, or beyond a float
    else:
        assert QUANTITY.fullmatch(text) and amount >= 0


SCALARS = [
    ("2024-01-01", "2024-01-01"),
    ("2024-01-01T10:00:00Z", "2024-01-01T10:00:00Z"),
    ("!!timestamp 2024-01-01", "2024-01-01"),
    ("12:30:45", "12:30:45"),
    ("=", "="),
    ("1.5.2", "1.5.2"),
    ("08:00", "08:00"),
    ("1e1", 10),
    ("1.5e1", 15),
    ("0o17", 15),
    ("017", 15),
    ("-0b11", -3),
    ("0x1F", 31),
    ("1_000", 1000),
    ("2.0", 2),
    ("089", 89),
    ("1.5", 1.5),
    (".5", 0.5),
    ("y", True),
    ("Off", False),
    ("~", None),
    ('"y"', "y"),
    ("'2'", "2"),
    ("!!str 2", "2"),
]


@pytest.mark.parametrize("text, value", SCALARS, ids=[text for text, _ in SCALARS])
def test_scalars_are_those_of_kubectl(text, value):
    """As `resolve` of sigs.k8s.io/yaml reads them, and JSON carries them."""
    (found,) = yaml.load(f"[{text}]", tfjob._Loader)
    assert found == value and type(found) is type(value)


def test_words_that_look_like_dates_and_times_are_texts(read, tmp_path):
    read(job(Worker=replica(command=COMMAND)))
    text = (tmp_path / "job.yaml").read_text()
    words = "[python, mnist.py, 2024-01-01, 12:30:45, a=b]"
    text = re.sub(r"command:\n(\s+- .*\n)+", f"command: {words}\n", text)
    (tmp_path / "job.yaml").write_text(text)
    options, _ = tfjob.read_tfjob("job.yaml", None, [])
    assert options["of_roles"]["worker"].arguments == ("2024-01-01", "12:30:45", "a=b")


OF_SHELL = ("# here", "--dir ~/x", "--lr {1,2}", "[ab].csv", "(b)", '"$A"', "a; b", "a\nb")
CONTAINER = "spec/tfReplicaSpecs/Worker/template/spec/containers"
WRONG = [
    ("kind", "PyTorchJob", "a file with one TFJob; received: job.yaml with ['PyTorchJob']"),
    ("kind", "TFjob", "received: job.yaml with ['TFjob']. Give kind: TFJob, alone."),
    ("apiVersion", "v1", "apiVersion of a TFJob is kubeflow.org/v1; received: 'v1'"),
    ("spec", None, "spec of the TFJob is a map; received: none"),
    ("spec/tfReplicaSpecs", {}, "tfReplicaSpecs names the replicas; received: none"),
    ("spec/tfReplicaSpecs/Launcher", {}, "is Chief, Master, Worker, PS or Evaluator; received: 'Launcher'"),
    (
        "spec/tfReplicaSpecs/WORKER",
        {},
        "A role must appear once in tfReplicaSpecs; received: Worker and another worker",
    ),
    ("spec/tfReplicaSpecs", {"PS": replica(), "Worker": replica(1)}, "and a Worker; received: ps, worker. Add"),
    ("spec/tfReplicaSpecs/Chief", replica(2), "There is one chief at most; received: 2. Set its replicas to 1"),
    ("spec/tfReplicaSpecs/Worker/replicas", "2", "replicas of worker is an integer of at least 0; received: '2'"),
    ("spec/tfReplicaSpecs/Worker/replicas", -1, "replicas of worker is an integer of at least 0; received: -1"),
    ("spec/tfReplicaSpecs/Worker/replicas", 0, "A TFJob has a Chief or a Worker; received: none"),
    ("spec/tfReplicaSpecs/Worker/restartPolicy", "Maybe", "received: Maybe"),
    ("spec/tfReplicaSpecs/Worker/template", None, "template of worker is a map; received: none"),
    ("spec/runPolicy/backoffLimit", -1, "backoffLimit is an integer of at least 0; received: -1"),
    (CONTAINER, "tensorflow", "containers of worker is a list of maps; received: 'tensorflow'"),
    (f"{CONTAINER}/0/name", "main", "One container of worker has the name tensorflow; received: ['main']"),
    (f"{CONTAINER}/0/command", "python mnist.py", "command of worker is a list of texts; received: 'python mnist.py'"),
    (f"{CONTAINER}/0/command", ["./train"], "starts a Python script or module; received: ./train. Name the script"),
    (f"{CONTAINER}/0/command", ["sh", "-c", "cd /x && python a.py"], "must be here; received: a.py. Name it here"),
    (
        f"{CONTAINER}/0/command",
        ["python", "/gone.py"],
        "/gone.py. Name it here, --tfjob job.yaml SCRIPT, or run the command where it is, by `ray job submit`",
    ),
    *(
        (f"{CONTAINER}/0/command", ["sh", "-c", text], "starts a Python script or module; received: sh -c")
        for text in ("", "# mnist.py", "python mnist.py 'a", *(f"python mnist.py {word}" for word in OF_SHELL))
    ),
    (f"{CONTAINER}/0/env", {"A": "1"}, "env of worker is a list of names and values"),
    (f"{CONTAINER}/0/env", [{"name": 1, "value": "x"}], "each name a text; received: [{'name': 1"),
    (f"{CONTAINER}/0/env", [{"name": "A", "value": 1}], "The value of A in env of worker is a text; received: 1"),
    (f"{CONTAINER}/0/resources", {"limits": {"cpu": "four"}}, "cpu of worker is a quantity such as 2 or 500m"),
    (f"{CONTAINER}/0/resources", {"limits": {"cpu": "-2"}}, "cpu of worker is at least 0; received: '-2'"),
    (f"{CONTAINER}/0/resources", {"limits": {"cpu": True}}, "cpu of worker is a quantity such as 2 or 500m"),
    (f"{CONTAINER}/0/resources", {"limits": {"memory": "16 GB"}}, "memory of worker is a quantity such as 2 or 500m"),
    (f"{CONTAINER}/0/resources", {"limits": {"google.com/tpu": 4}}, "received: google.com/tpu of worker. Leave it out"),
    (f"{CONTAINER}/0/resources", {"limits": {"nvidia.com/mig-1g.5gb": 1}}, "device that raytf run places is"),
    (
        f"{CONTAINER}/0/resources",
        {"limits": {"nvidia.com/gpu": "1500m"}},
        "nvidia.com/gpu of worker is a whole number; received: '1500m'",
    ),
    ("spec/successPolicy", "AllWorker", "successPolicy is AllWorkers, or absent; received: 'AllWorker'"),
]


@pytest.mark.parametrize("path, value, message", WRONG, ids=[path for path, *_ in WRONG])
def test_wrong_files_are_refused(read, path, value, message):
    made = copy.deepcopy(job(Worker=replica(2, command=COMMAND)))
    *way, last = [int(part) if part.isdecimal() else part for part in path.split("/")]
    at = made
    for part in way:
        at = at[part]
    at[last] = value
    with pytest.raises(ConfigError) as raised:
        read(made)
    assert message in str(raised.value)


def test_roles_may_have_scripts_of_their_own(read):
    evaluator = replica(command=["python", "other.py", "--steps=1"])
    spec, _ = read(job(Worker=replica(2, command=COMMAND), Evaluator=evaluator))
    assert {str(task): spec.script_of(task) for task in spec.tasks()} == {
        "worker 0": ("mnist.py", False),
        "worker 1": ("mnist.py", False),
        "evaluator 0": ("other.py", False),
    }
    with pytest.raises(ConfigError, match="must be here; received: gone.py"):
        read(job(Worker=replica(command=COMMAND), Evaluator=replica(command=["python", "gone.py"])))


VALUES = [{"name": "DIR", "value": "/data"}, {"name": "TEXT", "value": 'a "b" \\ c'}]
SHELL = [
    ("python mnist.py --dir=$DIR/x", ("--dir=/data/x",), {}),
    ('python mnist.py "${DIR} $TEXT"', ('/data a "b" \\ c',), {}),
    ("python mnist.py '$DIR' \\$DIR", ("$DIR", "$DIR"), {}),
    ("set -ex\npython mnist.py -x\n", ("-x",), {}),
    ("set -e -o pipefail; set -u && python mnist.py", (), {}),
    ("A=1 B='x y' C= exec python mnist.py a=b", ("a=b",), {"A": "1", "B": "x y", "C": ""}),
    ("cd /app && python mnist.py -x", ("-x",), {}),
]


@pytest.mark.parametrize("text, arguments, variables", SHELL, ids=[text for text, *_ in SHELL])
def test_what_a_shell_does_before_a_command(read, text, arguments, variables):
    """Read as `sh` runs it: the same words and variables."""
    spec, messages = read(job(Worker=replica(command=["sh", "-c", text], env=VALUES)))
    (task,) = spec.tasks()
    assert spec.script == "mnist.py" and spec.arguments_of(task) == arguments
    assert variables.items() <= spec.variables(task).items()
    folder = "--tfjob: cd /app of worker is not honoured: the script runs in the current folder"
    assert (folder in messages) == text.startswith("cd")
    shown = "import os, sys; print([*sys.argv[2:], *(os.environ[name] for name in sys.argv[1].split())])"
    started = f"{shlex.quote(sys.executable)} -c {shlex.quote(shown)} '{' '.join(variables)}'"
    given = text.replace("python mnist.py", started).replace("cd /app", "cd /").replace("set -e -o pipefail", "set -e")
    values = {entry["name"]: entry["value"] for entry in VALUES}
    out = subprocess.run(["sh", "-c", given], env=values, capture_output=True, text=True, check=True).stdout
    assert out == f"{[*arguments, *variables.values()]}\n"


@pytest.mark.parametrize("text", ["python mnist.py $TEXT", "python mnist.py $HOME", "python mnist.py ${DIR:-x}"])
def test_a_variable_that_is_not_known_or_several_words_is_refused(read, text):
    with pytest.raises(ConfigError, match="starts a Python script or module"):
        read(job(Worker=replica(command=["sh", "-c", text], env=VALUES)))


@pytest.mark.parametrize("options", [["-euxo", "pipefail", "-c"], ["-e", "-c"], ["-lc"]])
def test_options_of_a_shell(read, options):
    spec, _ = read(job(Worker=replica(command=["bash", *options, "python mnist.py -x"])))
    assert spec.arguments_of(spec.tasks()[0]) == ("-x",)


def test_a_script_of_the_folder_to_which_the_command_changes(read, tmp_path):
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "train.py").touch()
    spec, _ = read(job(Worker=replica(command=["sh", "-c", f"cd {tmp_path}/app && python train.py"])))
    assert spec.script == f"{tmp_path}/app/train.py"


def test_ray_places_by_requests_and_threads_follow_limits(read):
    resources = {"requests": {"cpu": "500m", "nvidia.com/gpu": 1}, "limits": {"cpu": 8, "nvidia.com/gpu": 1}}
    spec, _ = read(job(Worker=replica(command=COMMAND, resources=resources)))
    (task,) = spec.tasks()
    assert spec.bundle(task) == {"CPU": 0.5, "GPU": 1} and spec.variables(task)["OMP_NUM_THREADS"] == "8"


IMAGES = [
    ("kubeflow/tf-mnist-with-summaries:latest", "mnist_with_summaries.py", (), False),
    ("docker.io/kubeflow/tf-dist-mnist-test@sha256:12", "dist_mnist.py", (), True),
    (
        "kubeflow/tf-multi-worker-strategy:latest",
        "multi_worker_strategy-with-keras.py",
        ("--saved_model_dir", "/train/saved_model/", "--checkpoint_dir", "/train/checkpoint"),
        True,
    ),
]


@pytest.mark.parametrize("image, script, arguments, keras_2", IMAGES, ids=[image for image, *_ in IMAGES])
def test_the_public_images_are_known(read, monkeypatch, image, script, arguments, keras_2):
    made = job(Worker=replica(2, image=image, args=["--epochs=1"]))
    with pytest.raises(ConfigError, match=rf"must be here; received: /\S*{script}"):
        read(made)
    monkeypatch.setattr("raytf.launch.spec.legacy_keras.check_installed", lambda *_: None)
    spec, messages = read(made, "mnist.py")
    assert spec.arguments_of(spec.tasks()[0]) == (*arguments, "--epochs=1") and spec.legacy_keras == keras_2
    assert sum(f"{script}" in text for text in messages) == 1


@pytest.mark.parametrize("options, bundle", [([], {"CPU": 2, "GPU": 1}), (["--gpus-per-worker", "0"], {"CPU": 2})])
def test_a_job_of_gpus_is_tried_on_cpus(read, monkeypatch, options, bundle):
    resources = {"limits": {"cpu": 2, "nvidia.com/gpu": 1}}
    read(
        job(
            Chief=replica(command=COMMAND),
            PS=replica(command=COMMAND),
            Worker=replica(command=COMMAND, resources=resources),
        )
    )
    given = []
    monkeypatch.setattr("raytf.launch.launcher.connect_cluster", lambda *_: None)
    monkeypatch.setattr("raytf.launch.launcher.launch_script", given.append)
    CliRunner().invoke(main, ["run", "--tfjob", "job.yaml", *options])
    CliRunner().invoke(main, ["run", "--tfjob", "job.yaml", *options, "--cpus-per-worker", "0.5"])
    by_role = [{task.role: spec.bundle(task) for task in spec.tasks()} for spec in given]
    assert by_role[0] == {"chief": {"CPU": 1}, "ps": {"CPU": 1}, "worker": bundle}
    assert by_role[1] == {"chief": {"CPU": 0.5}, "ps": {"CPU": 0.5}, "worker": bundle | {"CPU": 0.5}}


TWICE = """apiVersion: kubeflow.org/v1
kind: TFJob
spec:
  runPolicy: &policy {<<: {backoffLimit: 1}, backoffLimit: 2}
  tfReplicaSpecs:
    Worker:
      replicas: 1
      replicas: 2
"""


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--tfjob", "job.yaml", "--num-workers", "3"], "the YAML sets what runs where; received: --num-workers"),
        (["--tfjob", "text.yaml"], "--tfjob takes a YAML file; received: while parsing"),
        (["--tfjob", "twice.yaml"], 'replicas is twice in a map in "twice.yaml", line 8, column 7. Correct the file'),
        ([], "Missing argument 'SCRIPT'"),
    ],
)
def test_wrong_commands_are_refused(read, tmp_path, arguments, message):
    read(job(Worker=replica(command=COMMAND)))
    (tmp_path / "text.yaml").write_text("a: [")
    (tmp_path / "twice.yaml").write_text(TWICE)
    done = CliRunner().invoke(main, ["run", *arguments])
    assert done.exit_code == 2 and message in done.output
