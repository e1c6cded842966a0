"""The files of cluster/kubernetes, without Kubernetes: schemas, rules in CEL, pods, image, scripts; wrong fields."""

from __future__ import annotations

import copy
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import pytest
import yaml
from ray.scripts import scripts

from raytf import cli
from tests.unit.kubernetes import checks

FOLDER = checks.ROOT / "cluster" / "kubernetes"
MANIFESTS = ("train.yaml", "interactive.yaml", "nightly.yaml", "storage.yaml")
GONE = object()


def documents(name: str) -> list[dict]:
    return list(yaml.load_all((FOLDER / name).read_text(), yaml.CSafeLoader))


def patched(found: list[dict], path: str, value) -> list[dict]:
    """The documents with one field changed, added or (GONE) left out; list items by index, or by name=..."""
    found = copy.deepcopy(found)
    *way, last = [int(part) if part.isdecimal() else part for part in path.split("/")]
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
    (
        "interactive",
        "0/spec/workerGroupSpecs/0/template/spec/restartPolicy",
        "Always",
        "must be Never with autoscaling",
    ),
    # by what raytf needs
    ("train", f"{CLUSTER}/authOptions/mode", "disabled", "the cluster lets in everybody"),
    ("train", f"{CLUSTER}/rayVersion", "2.9.0", "rayVersion 2.9.0 is not that of constraints.txt"),
    ("train", f"{WORKERS}/template/metadata/labels/raytf-cluster", "other", "closes the ports of workers to others"),
    ("train", "1/spec/ingress/+", {}, "no NetworkPolicy closes the ports of head to others"),
    ("train", f"{RAY}/image", "raytf:latest", "raytf:latest, is none that kustomization.yaml sets"),
    ("train", f"{POD}/terminationGracePeriodSeconds", 30, "workers must be drained before it ends"),
    ("train", f"{POD}/volumes/2/emptyDir/sizeLimit", "64Mi", "workers needs a /dev/shm in memory of 256 MiB or more"),
    ("train", "0/spec/entrypoint", "python jobs/digits.py --nam x --storage /shared/r", "has not: --nam"),
    ("train", "0/spec/entrypoint", "python jobs/digits.py --name x --storage /root/r", "/root/r is on no volume"),
    (
        "train",
        "0/spec/entrypoint",
        "python jobs/digits.py --storage /shared/r",
        "a retry resumes a run that has a --name",
    ),
    ("train", f"{WORKERS}/replicas", 1, "worker group workers has not minReplicas <= replicas"),
    ("train", f"{CLUSTER}/headGroupSpec/template/spec/restartPolicy", "Always", "must be Never in SidecarMode"),
    ("train", f"{RAY}/resources/limits/cpu", "8", "a pod has 8 CPUs, and its worker 4"),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name, path, value, message", WRONG, ids=[f"{name}-{path}" for name, path, *_ in WRONG])
def test_a_wrong_field_is_refused(name, path, value, message):
    found = checks.refusals(patched(documents(f"{name}.yaml"), path, value))
    assert any(message in text for text in found), found


def test_the_pages_entrypoint_has_its_workers_where_kustomize_sets_them():
    page = (checks.ROOT / "docs" / "guides" / "kubernetes.md").read_text()
    (text,) = re.findall(r"```yaml\n(entrypoint:.*?)```", page, re.DOTALL)
    replacements = {
        rule["source"]["fieldPath"]: target["options"]
        for rule in yaml.safe_load((FOLDER / "kustomization.yaml").read_text())["replacements"]
        for target in rule["targets"]
        if "spec.entrypoint" in target["fieldPaths"]
    }
    words = yaml.safe_load(text)["entrypoint"].split(" ")
    options = {"data.workers": "--num-workers", "data.cpu": "--cpus-per-worker"}
    assert replacements.keys() == options.keys()
    for source, options_of_source in replacements.items():
        place = options_of_source["index"]
        assert words[place - 1] == options[source] and words[place].isdigit() and options_of_source["delimiter"] == " "
    found = cli.main.commands["train"].make_context("train", words[2:]).params
    assert found["num_workers"] == 4 and found["cpus_per_worker"] == 4


def test_settings_and_images_reach_every_file(tmp_path):
    """What `kubectl apply -k` sends, with other settings; all of it is what Kubernetes and KubeRay take."""
    if not shutil.which("kubectl"):
        pytest.skip("kubectl is not installed")
    shutil.copytree(FOLDER, tmp_path, dirs_exist_ok=True)
    settings = yaml.safe_load((tmp_path / "settings.yaml").read_text())
    own = {"storage": "7Gi", "storage-class": "nfs", "workers": "2", "pods": "3", "cpu": "5", "memory": "9Gi"}
    settings["data"] |= own | {"gpu-pods": "1", "most-workers": "6", "most-gpu-workers": "2", "queue": "nights"}
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump(settings))
    done = subprocess.run(["kubectl", "kustomize", tmp_path], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    made = {(one["kind"], one["metadata"]["name"]): one for one in yaml.load_all(done.stdout, yaml.CSafeLoader)}
    assert ("ConfigMap", "settings") not in made and len(made) == 7
    claim, job = made["PersistentVolumeClaim", "raytf-storage"], made["RayJob", "raytf-train"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "7Gi" and claim["spec"]["storageClassName"] == "nfs"
    assert "--num-workers 2 --cpus-per-worker 5 --name" in job["spec"]["entrypoint"]
    (gpu,) = (group for group in checks.clusters(job)["workerGroupSpecs"] if group["groupName"] == "gpu")
    assert gpu["replicas"] == gpu["minReplicas"] == gpu["maxReplicas"] == 1
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "nights"
    sizes = {"spot": 6, "gpu": 2, "workers": 3}
    for document in made.values():
        if not (cluster := checks.clusters(document)):
            continue
        for name, group in checks.groups(cluster).items():
            (container,) = group["template"]["spec"]["containers"]
            assert container["image"].startswith("registry.example/raytf") and container["image"].endswith(":0.2.0")
            if name != "head":
                assert container["resources"]["limits"]["cpu"] == "5", name
                assert container["resources"]["requests"]["memory"] == "9Gi", name
            if name in ("spot", "workers") or document["kind"] == "RayCluster":
                assert group.get("maxReplicas", sizes.get(name)) == sizes.get(name), name
            container["image"] = re.sub(r".*/(.*):.*", r"\1", container["image"])  # as the checks know it
    assert checks.refusals(list(made.values())) == []


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
    """Every file that the Dockerfile copies is there, and pip gets the constraints."""
    text = (FOLDER / "Dockerfile").read_text()
    copied = [line.split()[1:-1] for line in text.splitlines() if line.startswith("COPY")]
    names = [name for words in copied for name in words if not name.startswith("--")]
    assert names and all((checks.ROOT / name).exists() for name in names)
    assert "--constraint constraints.txt" in text and text.index("COPY pyproject") < text.index("pip install")
