"""The files of cluster/kubernetes, without Kubernetes: schemas, rules in CEL, pods, image, scripts; wrong fields."""

from __future__ import annotations

import importlib.metadata
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import celpy
import kubernetes_validate
import pytest
import yaml
from packaging.requirements import Requirement
from ray.scripts import scripts

from raytf import cli
from tests import blocks
from tests.unit.kubernetes import checks

# A minute of scripts for files that are static: `make test-all` runs it.
pytestmark = pytest.mark.slow

FOLDER = checks.FOLDER
MANIFESTS = ("train.yaml", "interactive.yaml", "nightly.yaml", "storage.yaml")
GONE = object()


def documents(name: str) -> list[dict]:
    return list(yaml.load_all((FOLDER / name).read_text(), yaml.CSafeLoader))


def patched(found: list[dict], path: str, value) -> list[dict]:
    """The documents with one field changed, added or (GONE) left out; list items by index, and ~ for / in a name."""
    found = json.loads(json.dumps(found))  # a field with an anchor is changed in one place alone
    *way, last = [int(part) if part.isdecimal() else part.replace("~", "/") for part in path.split("/")]
    at = found
    for part in way:
        at = at.setdefault(part, {}) if isinstance(at, dict) else at[part]
    if value is GONE:
        del at[last]
    elif last == "+":
        at.append(value)
    else:
        at[last] = value
    return found


@pytest.mark.parametrize("name", MANIFESTS)
def test_kubernetes_and_kuberay_would_take_the_file(name):
    assert checks.refusals(documents(name)) == []


CLUSTER = "0/spec/rayClusterSpec"
WORKERS = f"{CLUSTER}/workerGroupSpecs/0"
POD = f"{WORKERS}/template/spec"
RAY = f"{POD}/containers/0"
HEAD = f"{CLUSTER}/headGroupSpec"
NIGHT = "0/spec/jobTemplate/rayClusterSpec"
SUBMITTER = "0/spec/jobTemplate/submitterPodTemplate/spec"
COMMAND = "python /opt/raytf/jobs/digits.py --num-workers 4 --cpus-per-worker 4 --name x --storage /shared/r"
NIGHTLY = "python /opt/raytf/jobs/sweep_digits.py --num-workers 5 --storage /shared/runs"
WRONG = [
    # of types and names, by KubeRay's schema
    ("train", "0/spec/backoffLimit", "three", "spec.backoffLimit: 'three' is not of type 'integer'"),
    ("train", "0/spec/backofLimit", 3, "Additional properties are not allowed ('backofLimit' was unexpected)"),
    ("train", "0/kind", "RayTraining", "KubeRay has no kind 'RayTraining'"),
    ("train", "0/spec/preRunningDeadlineSeconds", 0, "spec.preRunningDeadlineSeconds: 0 is less than the minimum of 1"),
    ("train", f"{CLUSTER}/headGroupSpec", GONE, "spec.rayClusterSpec: 'headGroupSpec' is a required property"),
    ("train", f"{CLUSTER}/authOptions/mode", "password", "'password' is not one of ['disabled', 'token']"),
    ("train", f"{WORKERS}/rayStartParams", {"num-cpus": 4}, "rayStartParams.num-cpus: 4 is not of type 'string'"),
    ("train", f"{WORKERS}/groupName", GONE, "workerGroupSpecs.0: 'groupName' is a required property"),
    ("train", f"{RAY}/resources/limits/memory", "16 GB", "resources.limits.memory: '16 GB' does not match"),
    ("train", f"{RAY}/imagePullPolice", "Always", "('imagePullPolice' was unexpected)"),
    ("train", f"{RAY}/env/+", {"name": "HOME", "value": "/"}, "two items have name HOME"),
    ("nightly", "0/spec/timeZone", "", "spec.timeZone: '' should be non-empty"),
    ("nightly", "0/spec/schedule", GONE, "spec: 'schedule' is a required property"),
    ("interactive", "0/spec/upgradeStrategy", {"type": "Rolling"}, "'Rolling' is not one of ['Recreate', 'None']"),
    # by its rules in CEL
    ("train", "0/spec/managedBy", "me", "spec.managedBy: the managedBy field value must be either"),
    (
        "train",
        "0/spec/deletionStrategy",
        {"onSuccess": {"policy": "DeleteSelf"}},
        "deletionStrategy requires either BOTH onSuccess and onFailure",
    ),
    (
        "nightly",
        "0/spec/jobTemplate/deletionStrategy",
        {"deletionRules": [{"policy": "DeleteSelf", "condition": {}}]},
        "the deletion condition requires either the JobStatus",
    ),
    # of pods, policies and claims, by Kubernetes' schemas and what it checks in addition to them
    ("train", f"{POD}/terminationGracePeriodSeconds", "1m", "terminationGracePeriodSeconds: '1m' is not of type"),
    ("train", f"{RAY}/volumeMounts/0/name", "data", "ray mounts 'data', which is no volume of the pod"),
    ("train", f"{RAY}/resources/requests/cpu", "8", "ray requests 8 cpu, more than its limit 4"),
    ("train", "1/spec/ingress/0/form", [], "('form' was unexpected)"),
    ("train", "1/spec/podSelector", GONE, "'podSelector' is a required property"),
    ("storage", "0/spec/accessModes", "ReadWriteMany", "spec.accessModes: 'ReadWriteMany' is not of type"),
    # by KubeRay's operator
    ("train", "0/metadata/name", "Raytf.Train", "'Raytf.Train' is no name"),
    ("train", f"{WORKERS}/maxReplicas", 2, "worker group workers has not minReplicas <= replicas <= maxReplicas"),
    ("train", f"{WORKERS}/minReplicas", -1, "worker group workers has not minReplicas <= replicas <= maxReplicas"),
    ("train", "0/spec/shutdownAfterJobFinishes", False, "ttlSecondsAfterFinished needs shutdownAfterJobFinishes"),
    ("train", "0/spec/submissionMode", "InteractiveMode", "backoffLimit needs a cluster of the job's own"),
    ("nightly", "0/spec/schedule", "nightly", "schedule 'nightly' has not five fields"),
    ("nightly", "0/spec/schedule", "61 2 * * *", "'61' of schedule '61 2 * * *' is not within 0 to 59"),
    ("nightly", "0/spec/schedule", "0 2 * * 5-1", "'5-1' of schedule '0 2 * * 5-1' is not within 0 to 6"),
    ("train", "0/spec/runtimeEnvYAML", "env_vars: {", "runtimeEnvYAML is no YAML: while parsing"),
    (
        "interactive",
        "0/spec/workerGroupSpecs/0/template/spec/restartPolicy",
        "Always",
        "must be Never with autoscaling",
    ),
    # by what raytf needs
    ("train", f"{CLUSTER}/authOptions/mode", "disabled", "the cluster lets in everybody"),
    ("train", f"{CLUSTER}/rayVersion", "2.9.0", "rayVersion 2.9.0 is not that of constraints.txt"),
    ("train", f"{CLUSTER}/authOptions/secretName", "token", "the token is in the Secret raytf-token, and not in token"),
    ("train", f"{WORKERS}/template/metadata/labels/raytf-cluster", "other", "closes the ports of workers to others"),
    ("train", "1/spec/ingress/+", {}, "no NetworkPolicy closes the ports of head, workers, gpu to others"),
    ("train", "1/spec/ingress/1/from", GONE, "closes the ports of head, workers, gpu to others"),
    ("train", "1/spec/ingress/1/from", [], "closes the ports of head, workers, gpu to others"),
    ("train", "1/spec/ingress/1/from/+", {"namespaceSelector": {}}, "closes the ports of head, workers, gpu to"),
    ("train", "1/spec/ingress/1/ports/0/port", 6379, "closes the ports of head, workers, gpu to others"),
    ("train", "0/spec/submissionMode", "K8sJobMode", "resumes it, in submissionMode SidecarMode alone"),
    ("train", "0/spec/backoffLimit", 0, "no retry resumes the job: backoffLimit must be 1 or more"),
    ("train", "0/metadata/labels/kueue.x-k8s.io~queue-name", GONE, "finds its queue by the label kueue.x-k8s.io/queue"),
    (
        "train",
        f"{POD}/volumes/0/persistentVolumeClaim/claimName",
        "mine",
        "is mine, and storage.yaml has raytf-storage",
    ),
    ("train", "0/spec/runtimeEnvYAML", "env_var: {A: b}", "runtimeEnvYAML has what Ray does not know: env_var"),
    (
        "train",
        "0/spec/runtimeEnvYAML",
        "env_vars: {STOP: '60'}",
        "a stop waits for the step by RAY_JOB_STOP_WAIT_TIME_S",
    ),
    ("train", f"{HEAD}/rayStartParams/nmu-cpus", "0", "ray start, which makes head, has no option nmu-cpus"),
    ("train", f"{RAY}/resources/limits/nvidia.com~gpus", 1, "workers asks for nvidia.com/gpus, which no node has"),
    (
        "train",
        f"{CLUSTER}/workerGroupSpecs/1/template/spec/tolerations/0/effect",
        "NoSchedul",
        "a toleration has the effect 'NoSchedul', which no taint has",
    ),
    ("train", f"{RAY}/image", "raytf:latest", "raytf:latest, is none that settings.yaml sets"),
    ("train", f"{POD}/securityContext/fsGroupChangePolicy", GONE, "workers walks its volumes at each start"),
    ("train", f"{POD}/terminationGracePeriodSeconds", 30, "workers must be drained before it ends"),
    ("train", f"{POD}/volumes/2/emptyDir/sizeLimit", "64Mi", "workers needs a /dev/shm in memory of 256 MiB or more"),
    ("train", "0/spec/entrypoint", f"{COMMAND} --max-failure 3", "has not: --max-failure"),
    ("train", "0/spec/entrypoint", COMMAND.replace("/shared", "/root"), "/root/r is on no volume"),
    ("train", "0/spec/entrypoint", COMMAND.replace("--name x ", ""), "a retry resumes a run that has a --name"),
    ("train", "0/spec/entrypoint", COMMAND.replace("s 4 --cpus", "s 5 --cpus"), "5 is more than the 4 pods for them"),
    ("train", "0/spec/entrypoint", COMMAND.replace("4 --name", "500m --name"), "500m is no whole number"),
    ("train", "0/spec/entrypoint", COMMAND.replace("s 4 --cpus", "s $WORKERS --cpus"), "that submits the job has no"),
    ("train", "0/spec/entrypoint", f"sh -c 'exec {COMMAND}$RUN'", "the head's container has no variable RUN"),
    ("train", "0/spec/entrypoint", "python my.py", "the image has no my.py"),
    ("nightly", "0/spec/jobTemplate/rayClusterSpec/workerGroupSpecs/0/replicas", 1, "has not minReplicas <= replicas"),
    ("nightly", "0/spec/jobTemplate/entrypoint", NIGHTLY, "--num-workers 5 is more than the 4 pods for them"),
    ("train", f"{WORKERS}/replicas", 1, "worker group workers has not minReplicas <= replicas"),
    ("train", f"{CLUSTER}/headGroupSpec/template/spec/restartPolicy", "Always", "must be Never in SidecarMode"),
    ("train", f"{RAY}/resources/limits/cpu", "8", "a pod has 8 CPUs, and its worker 4"),
    ("train", "0/spec/submitterPodTemplate", {"spec": {"containers": [{"name": "x"}]}}, "SidecarMode does not support"),
    ("train", f"{HEAD}/template/spec/tolerations", GONE, "the head must leave a dead node after 30 s"),
    ("nightly", f"{NIGHT}/headGroupSpec/template/spec/tolerations/1/tolerationSeconds", 300, "must leave a dead node"),
    ("nightly", "0/spec/jobTemplate/submitterPodTemplate", GONE, "the pod that submits the job a securityContext"),
    ("nightly", f"{SUBMITTER}/containers/0/image", "ratf", "the image of the submitter is not that of the head"),
    ("nightly", f"{SUBMITTER}/containers/0/securityContext", GONE, "submitter needs allowPrivilegeEscalation: false"),
    ("nightly", f"{SUBMITTER}/securityContext/runAsNonRoot", False, "submitter needs runAsNonRoot"),
    ("nightly", f"{SUBMITTER}/containers/0/volumeMounts/0/name", "x", "mounts 'x', which is no volume of the pod"),
    ("interactive", "0/spec/autoscalerOptions/securityContext", GONE, "autoscaler needs allowPrivilegeEscalation"),
    ("train", f"{RAY}/securityContext/capabilities/add", ["SYS_PTRACE"], "workers needs allowPrivilegeEscalation"),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name, path, value, message", WRONG, ids=[f"{name}-{path}" for name, path, *_ in WRONG])
def test_a_wrong_field_is_refused(name, path, value, message):
    found = checks.refusals(patched(documents(f"{name}.yaml"), path, value))
    assert len(found) == 1 and message in found[0], found


@pytest.mark.parametrize("more", ["", " --gpus-per-worker 1"])
def test_the_pages_entrypoint_has_the_workers_of_the_settings(more):
    block = blocks.named("docs/guides/kubernetes.md", "entrypoint")
    entrypoint = yaml.safe_load(block.text)["entrypoint"].replace(" --max", f"{more} --max")
    found = patched(documents("train.yaml"), "0/spec/entrypoint", entrypoint)
    if more:
        groups = checks.clusters(found[0])["workerGroupSpecs"]
        groups[0] |= {"replicas": 0, "minReplicas": 0}
        groups[1]["replicas"] = 4
    assert checks.refusals(found) == []
    program, command, *words = checks.words_of(entrypoint, checks.clusters(found[0]))
    values = cli.main.commands[command].make_context(command, words).params
    assert program == "raytf" and values["num_workers"] == 4 and values["cpus_per_worker"] == 4


def render(folder: pathlib.Path) -> list[dict]:
    """What `kubectl apply -k` sends."""
    if not shutil.which("kubectl"):
        pytest.skip("kubectl is not installed")
    done = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return list(yaml.load_all(done.stdout, yaml.CSafeLoader))


def rendered_refusals(folder: pathlib.Path) -> list[str]:
    made = yaml.safe_load((folder / "settings.yaml").read_text())["data"]
    return checks.refusals(render(folder), {"raytf": made["image"], "raytf-cuda": made["cuda-image"]})


@pytest.fixture
def changed(tmp_path):
    """Copies the folder with other settings, and text of a file replaced by another."""

    def change(file: str = "settings.yaml", old: str = "", new: str = "", **settings: str) -> pathlib.Path:
        shutil.copytree(FOLDER, tmp_path, dirs_exist_ok=True)
        path = tmp_path / "settings.yaml"
        made = yaml.safe_load(path.read_text())
        own = {name.replace("_", "-"): value for name, value in settings.items()}
        assert own.keys() <= made["data"].keys()
        path.write_text(yaml.safe_dump(made | {"data": made["data"] | own}))
        assert old in (tmp_path / file).read_text()
        (tmp_path / file).write_text((tmp_path / file).read_text().replace(old, new))
        return tmp_path

    return change


def test_settings_reach_every_file(changed):
    """All of what `kubectl apply -k` sends with other settings is what Kubernetes and KubeRay take."""
    own = {"storage": "7Gi", "storage_class": "nfs", "workers": "2", "pods": "3", "cpu": "5", "memory": "9Gi"}
    own |= {"gpu_pods": "1", "nightly_pods": "2", "most_workers": "6", "most_gpu_workers": "7", "queue": "nights"}
    own |= {"image": "own.example/a:1", "cuda_image": "own.example/b:2", "runs": "/shared/own", "nightly_workers": "1"}
    own |= {"head_cpu": "3", "head_memory": "6Gi", "shm": "2Gi"}
    folder = changed(**own)
    assert rendered_refusals(folder) == []
    made = {(one["kind"], one["metadata"]["name"]): one for one in render(folder)}
    assert ("ConfigMap", "settings") not in made and len(made) == 7
    claim, job = made["PersistentVolumeClaim", "raytf-storage"], made["RayJob", "raytf-train"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "7Gi" and claim["spec"]["storageClassName"] == "nfs"
    words = checks.words_of(job["spec"]["entrypoint"], checks.clusters(job))
    assert "--num-workers 2 --cpus-per-worker 5 --name" in " ".join(words) and words[-1] == "/shared/own"
    sweep = made["RayCronJob", "raytf-nightly"]["spec"]["jobTemplate"]
    words = checks.words_of(sweep["entrypoint"], sweep["rayClusterSpec"])
    assert words[2:4] == ["--num-workers", "1"] and words[-1] == "/shared/own"
    (submitter,) = sweep["submitterPodTemplate"]["spec"]["containers"]
    assert submitter["image"] == own["image"]
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "nights"
    most = {}
    for document in filter(checks.clusters, made.values()):
        for name, group in checks.groups(checks.clusters(document)).items():
            pod = group["template"]["spec"]
            ((container,), resources), head = (pod["containers"], pod["containers"][0]["resources"]), name == "head"
            assert resources["limits"]["cpu"] == resources["requests"]["cpu"] == ("3" if head else "5"), name
            assert resources["limits"]["memory"] == resources["requests"]["memory"] == ("6Gi" if head else "9Gi"), name
            assert container["image"] == own["cuda_image" if name == "gpu" else "image"], name
            (shm,) = (volume for volume in pod["volumes"] if volume["name"] == "shm")
            assert shm["emptyDir"]["sizeLimit"] == "2Gi", name
            if not head:
                most[document["kind"], name] = group["maxReplicas"]
    assert most == {
        ("RayJob", "workers"): 3,
        ("RayJob", "gpu"): 1,
        ("RayCluster", "spot"): 6,
        ("RayCluster", "gpu"): 7,
        ("RayCronJob", "workers"): 2,
    }


def test_a_second_training_is_a_copy_with_names_of_its_own(tmp_path):
    folder = shutil.copytree(FOLDER, tmp_path / "cluster" / "kubernetes")
    subprocess.run(["sh", "-ec", blocks.named("docs/guides/kubernetes.md", "second").text], cwd=tmp_path, check=True)
    assert rendered_refusals(folder) == []
    jobs = {one["metadata"]["name"]: one for one in render(folder) if one["kind"] == "RayJob"}
    assert jobs.keys() == {"raytf-train", "raytf-mine"}
    words = [checks.words_of(job["spec"]["entrypoint"], checks.clusters(job)) for job in jobs.values()]
    assert {given[given.index("--name") + 1] for given in words} == {"digits", "mine"}
    labels = [
        {
            group["template"]["metadata"]["labels"]["raytf-cluster"]
            for group in checks.groups(checks.clusters(job)).values()
        }
        for job in jobs.values()
    ]
    assert sorted(labels, key=str) == [{"mine"}, {"train"}]  # so that neither reaches the other's ports


def test_training_on_gpus_leaves_the_nightly_sweep_its_pods(changed):
    """As the page has it: no pods without a GPU, and a command that asks for GPUs."""
    command = "raytf train mymodels:build_model --gpus-per-worker 1 "
    folder = changed("train.yaml", "python /opt/raytf/jobs/digits.py ", command, workers="2", pods="0", gpu_pods="2")
    assert rendered_refusals(folder) == []


def test_another_entrypoint_stays_as_it_is(changed):
    text = (FOLDER / "train.yaml").read_text()
    (entrypoint,) = re.findall(r"entrypoint: >-\n.*?'\n", text, re.DOTALL)
    made = render(changed("train.yaml", entrypoint, "entrypoint: python my.py --name mine\n", workers="2", cpu="8"))
    assert [one["spec"]["entrypoint"] for one in made if one["kind"] == "RayJob"] == ["python my.py --name mine"]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"runs": "/data"}, "--storage /data is on no volume that all pods mount"),
        ({"shm": "64Mi"}, "head needs a /dev/shm in memory of 256 MiB or more"),
        ({"nightly_workers": "5"}, "raytf-nightly: --num-workers 5 is more than the 4 pods for them"),
        (("train.yaml", "$WORKERS", "$WORKER"), "the head's container has no variable WORKER"),
        ({"workers": "9"}, "--num-workers 9 is more than the 4 pods for them"),
        ({"pods": "0", "gpu_pods": "4"}, "--num-workers 4 is more than the 0 pods for them"),
        ({"nightly_pods": "1"}, "raytf-nightly: --num-workers 2 is more than the 1 pods for them"),
        ({"cpu": "500m"}, "--cpus-per-worker 500m is no whole number"),
        ({"memory": "16 GB"}, "resources.limits.memory: '16 GB' does not match"),
        ({"most_workers": "0"}, "worker group spot has not minReplicas <= replicas <= maxReplicas"),
    ],
    ids=str,
)
def test_a_wrong_folder_is_refused(changed, change, message):
    found = rendered_refusals(changed(*change) if isinstance(change, tuple) else changed(**change))
    assert any(message in text for text in found), found


@pytest.mark.parametrize(
    "old, new, messages",
    [
        ("", "", []),
        ("data.nightly-pods", "data.pods", ["nightly-pods is a setting on one side alone"]),
        (
            "data.queue",
            "data.queues",
            ["queue is a setting on one side alone", "queues is a setting on one side alone"],
        ),
        ("kind: RayJob}", "kind: RayJobs}", ["no document is of kind RayJobs"]),
    ],
)
def test_what_kustomize_passes_over_is_refused(changed, old, new, messages):
    assert sorted(checks.kustomization(changed("kustomization.yaml", old, new))) == messages


def lint(*command: str) -> str:
    done = subprocess.run(
        [pathlib.Path(sys.executable).with_name(command[0]), *command[1:]], capture_output=True, text=True
    )
    return done.stdout + done.stderr


def test_image_and_scripts_are_linted(tmp_path):
    assert lint("hadolint", str(FOLDER / "Dockerfile")) == ""
    scripts = [*FOLDER.glob("*.sh"), *FOLDER.parent.glob("*.sh")]
    assert len(scripts) == 3 and lint("shellcheck", *map(str, scripts)) == ""
    wrong = tmp_path / "Dockerfile"
    wrong.write_text(
        (FOLDER / "Dockerfile").read_text().replace("--no-install-recommends ", "").replace("USER 1000", "")
    )
    assert "DL3015" in lint("hadolint", str(wrong))
    (tmp_path / "drain.sh").write_text(
        (FOLDER / "drain.sh").read_text().replace('"$raylet/cmdline"', "$raylet/cmdline")
    )
    assert "SC2086" in lint("shellcheck", str(tmp_path / "drain.sh"))


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="processes of its own need root")
@pytest.mark.parametrize("ends", [True, False])
def test_a_pod_waits_until_its_ray_node_has_ended_or_its_time_is_over(tmp_path, ends):
    """The script finds the raylet, and not a worker that starts, and drains it by options that Ray's command takes."""
    (tmp_path / "ray").write_text(f'#!/bin/sh\necho "$*" > {tmp_path}/told; {"kill $RAYLET" if ends else ":"}\n')
    (tmp_path / "ray").chmod(0o755)
    raylet = "import signal; signal.signal(15, lambda *_: exit()); signal.pause()"
    started = f"exec -a /x/ray/raylet/raylet {sys.executable} -c '{raylet}' --node_id=ab12 --gcs-address=10.0.0.1:6379"
    worker = f"{sys.executable} -c '{raylet}' --raylet-name=/x/sockets/raylet --node-id=cd34 --gcs-address=10.0.0.2:1"
    lines = f"({started}) & export RAYLET=$!; (exec {worker}) & "
    lines += "until grep -q raylet-name /proc/$!/cmdline && grep -q node_id /proc/$RAYLET/cmdline; do sleep 0.1; done; "
    lines += f"{FOLDER}/drain.sh 2; kill -0 $RAYLET 2> /dev/null"
    command = ["unshare", "-m", "--pid", "--fork", "--kill-child", "--mount-proc", "bash", "-c", lines]
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode != 0) == ends, done.stderr
    name, *words = shlex.split((tmp_path / "told").read_text().replace("the pod is to end", "'the pod is to end'"))
    values = scripts.cli.commands[name].make_context(name, words).params
    assert values["node_id"] == "ab12" and values["address"] == "10.0.0.1:6379"
    assert values["deadline_remaining_seconds"] == 2 and values["reason"] == "DRAIN_NODE_REASON_PREEMPTION"


def test_the_image_installs_what_constraints_pin():
    """Every file that the Dockerfile copies is there, where the pods expect it, and pip gets the constraints."""
    text = (FOLDER / "Dockerfile").read_text()
    place, copied = pathlib.PurePosixPath("/"), {}
    for instruction, *words in (line.split() for line in text.splitlines() if line.strip()):
        if instruction == "WORKDIR":
            place /= words[0]
        elif instruction == "COPY":
            *sources, target = [word for word in words if not word.startswith("--")]
            copied |= {source: str(place / target) for source in sources}
    assert all((checks.ROOT / source).exists() for source in copied)
    assert copied["cluster/kubernetes/drain.sh"] == "/opt/raytf/drain.sh" and copied["jobs"] == "/opt/raytf/jobs"
    assert "--constraint constraints.txt" in text and text.index("COPY pyproject") < text.index("pip install")
    (image,) = re.findall(r"^FROM (.*)", text, re.MULTILINE)
    assert re.fullmatch(r"python:3\.11-slim-bookworm@sha256:[0-9a-f]{64}", image)


def test_the_policy_takes_the_pod_to_which_kuberay_adds_a_container():
    """By KubeRay's name of it, once; what it sets is typed, and only Kubernetes evaluates it."""
    policy, binding = documents("restricted.yaml")
    for document in (policy, binding):
        kubernetes_validate.validate(document, "1.36", strict=True)
    with pytest.raises(kubernetes_validate.ValidationError, match="matchCondition"):
        kubernetes_validate.validate(patched([policy], "0/spec/matchCondition", [])[0], "1.36", strict=True)
    assert binding["spec"]["policyName"] == policy["metadata"]["name"]
    (condition,) = policy["spec"]["matchConditions"]
    environment = celpy.Environment()
    program = environment.program(environment.compile(condition["expression"]))
    head = checks.templates(documents("train.yaml")[0])["head"]
    added, context = {"name": "ray-job-submitter"}, {"securityContext": {}}
    for more, taken in (([], False), ([added], True), ([added | context], False)):
        pod = {"metadata": head["metadata"], "spec": {"containers": [*head["spec"]["containers"], *more]}}
        assert bool(program.evaluate({"object": celpy.json_to_cel(pod)})) == taken


def test_the_constraints_pin_what_cuda_and_google_take():
    lines = (checks.ROOT / "constraints.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    asked = [Requirement(text) for text in importlib.metadata.requires("tensorflow")]
    of_cuda = [one for one in asked if one.marker and "and-cuda" in str(one.marker)]
    assert of_cuda and all(one.specifier.contains(pinned[one.name]) for one in of_cuda)
    (install,) = re.findall(r"pip install .*", (FOLDER.parent / "gcp.yaml").read_text())
    assert {name for name in install.split() if name.startswith("google-")} <= pinned.keys()
