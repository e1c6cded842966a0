"""What Kubernetes, KubeRay and its operator would refuse of a manifest, and what raytf needs, without a cluster."""

from __future__ import annotations

import functools
import json
import lzma
import pathlib
import re
import sys
from collections.abc import Iterator

import celpy
import jsonschema
import kubernetes_validate

from raytf.doctor.findings import MIN_SHM

KUBERNETES = "1.32"
ROOT = pathlib.Path(__file__).parents[3]
_CRDS = pathlib.Path(__file__).with_name("kuberay-1.7.0.json.xz")


def refusals(documents: list[dict]) -> list[str]:
    """What would refuse the documents of a file, each with its place; empty where nothing would."""
    found = []
    for document in documents:
        name = f"{document.get('kind')}/{document.get('metadata', {}).get('name')}"
        own = _kuberay if document.get("apiVersion") == "ray.io/v1" else _kubernetes
        found += [f"{name}: {text}" for text in own(document)]
    clustered = [document for document in documents if document.get("kind") in _schemas()]
    return found or [text for document in clustered for text in _own(document, documents)]


def clusters(document: dict) -> dict | None:
    """The spec of the Ray cluster of a document of KubeRay, or None."""
    spec = document["spec"]
    return {
        "RayCluster": lambda: spec,
        "RayJob": lambda: spec["rayClusterSpec"],
        "RayCronJob": lambda: spec["jobTemplate"]["rayClusterSpec"],
    }.get(document["kind"], lambda: None)()


def groups(cluster: dict) -> dict[str, dict]:
    """The head and the worker groups of a cluster, by name."""
    return {"head": cluster["headGroupSpec"]} | {group["groupName"]: group for group in cluster["workerGroupSpecs"]}


# ----------------------------------------------------------------------------------------------------- schemas


def _kubernetes(document: dict) -> Iterator[str]:
    try:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
    except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError) as error:
        yield _said(error)


def _kuberay(document: dict) -> Iterator[str]:
    if (kind := document["kind"]) not in _schemas():
        yield f"KubeRay has no kind {kind!r}"
        return
    errors = [_said(error) for error in _validator(kind).iter_errors(document)]
    errors += _rules(document, _schemas()[kind], "")
    yield from errors
    if errors:
        return
    cluster = clusters(document)
    for name, group in groups(cluster).items():
        pod = {"apiVersion": "v1", "kind": "Pod", **group["template"]}
        yield from (f"{name}: {text}" for text in (*_kubernetes(pod), *_pod(pod["spec"])))
    yield from _operator(document, cluster)


def _said(error) -> str:
    path = ".".join(str(part) for part in getattr(error, "absolute_path", ()))
    return f"{path}: {error.message}" if path else error.message


@functools.cache
def _schemas() -> dict[str, dict]:
    return json.loads(lzma.decompress(_CRDS.read_bytes()))


@functools.cache
def _validator(kind: str):
    return jsonschema.Draft202012Validator(_strict(_schemas()[kind]))


def _strict(schema):
    """A schema as `kubectl apply` has it: fields that it does not know are refused."""
    if isinstance(schema, list):
        return [_strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {}
    for key, value in schema.items():
        if key in ("properties", "patternProperties"):
            made[key] = {name: _strict(one) for name, one in value.items()}
        elif key != "description":
            made[key] = value if key in ("default", "enum") else _strict(value)
    if "properties" in made and "additionalProperties" not in made:
        made["additionalProperties"] = bool(schema.get("x-kubernetes-preserve-unknown-fields"))
        # The API server fills in defaults before it looks for what is missing.
        made["required"] = [n for n in schema.get("required", ()) if "default" not in schema["properties"][n]]
    return made


def _rules(value, schema: dict, path: str) -> Iterator[str]:
    """Kubernetes' rules in CEL, and keys that the items of a list must not share."""
    for rule in schema.get("x-kubernetes-validations", ()):
        if "oldSelf" not in rule["rule"] and not _program(rule["rule"]).evaluate({"self": celpy.json_to_cel(value)}):
            yield f"{path}: {' '.join(rule['message'].split())}"
    if isinstance(value, dict):
        for name, one in value.items():
            inner = schema.get("properties", {}).get(name) or schema.get("additionalProperties")
            if isinstance(inner, dict):
                yield from _rules(one, inner, f"{path}.{name}".lstrip("."))
    elif isinstance(value, list):
        keys = schema.get("x-kubernetes-list-map-keys", ())
        seen = [tuple(one.get(key) for key in keys) for one in value] if keys else []
        for twice in {key for key in seen if seen.count(key) > 1}:
            yield f"{path}: two items have {', '.join(keys)} {', '.join(map(str, twice))}"
        for i, one in enumerate(value):
            yield from _rules(one, schema.get("items", {}), f"{path}.{i}")


@functools.cache
def _program(rule: str):
    environment = celpy.Environment()
    return environment.program(environment.compile(rule))


# ------------------------------------------------------------------------------- what no schema covers, of pods


def _pod(spec: dict) -> Iterator[str]:
    """References within a pod, which the API server checks."""
    volumes = {volume["name"] for volume in spec.get("volumes", ())}
    for container in spec["containers"]:
        for mount in container.get("volumeMounts", ()):
            if mount["name"] not in volumes:
                yield f"{container['name']} mounts {mount['name']!r}, which is no volume of the pod"
        resources = container.get("resources", {})
        for name, amount in resources.get("requests", {}).items():
            limit = resources.get("limits", {}).get(name)
            if limit is not None and _quantity(amount) > _quantity(limit):
                yield f"{container['name']} requests {amount} {name}, more than its limit {limit}"


def _quantity(text) -> float:
    number, unit = re.fullmatch(r"([\d.]+)(\D*)", str(text)).groups()
    return float(number) * {"": 1, "m": 1e-3, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}[unit]


def _operator(document: dict, cluster: dict) -> Iterator[str]:
    """What KubeRay's operator refuses: `controllers/ray/utils/validation.go` of 1.7."""
    name, spec = document["metadata"]["name"], document["spec"]
    job = spec["jobTemplate"] if document["kind"] == "RayCronJob" else spec
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name) or len(name) > (
        36 if document["kind"] == "RayCronJob" else 47
    ):
        yield f"{name!r} is no name: too long, or not of a-z, 0-9 and -, a letter first"
    autoscales = cluster.get("enableInTreeAutoscaling", False)
    for group in cluster["workerGroupSpecs"]:
        least, most = group.get("minReplicas", 0), group.get("maxReplicas", sys.maxsize)
        if not 0 <= least <= group.get("replicas", least) <= most:
            yield f"worker group {group['groupName']} has not minReplicas <= replicas <= maxReplicas"
        if autoscales and group["template"]["spec"].get("restartPolicy", "Never") != "Never":
            yield f"restartPolicy of worker group {group['groupName']} must be Never with autoscaling"
    if job.get("backoffLimit", 0) < 0:
        yield "backoffLimit must not be negative"
    if job.get("backoffLimit") and (job.get("clusterSelector") or job.get("submissionMode") == "InteractiveMode"):
        yield "backoffLimit needs a cluster of the job's own"
    policy = cluster["headGroupSpec"]["template"]["spec"].get("restartPolicy", "Never")
    if job.get("submissionMode") == "SidecarMode" and policy != "Never":
        yield "restartPolicy of the head must be Never in SidecarMode"
    if job.get("ttlSecondsAfterFinished") and not job.get("shutdownAfterJobFinishes"):
        yield "ttlSecondsAfterFinished needs shutdownAfterJobFinishes"
    if document["kind"] == "RayCronJob" and len(spec["schedule"].split()) != 5:
        yield f"schedule {spec['schedule']!r} has not five fields"


# ------------------------------------------------------------------------------------------ what raytf asks for


def _own(document: dict, documents: list[dict]) -> Iterator[str]:
    """What no schema knows: token, ports, drain, shared memory, versions, and the command."""
    cluster, name = clusters(document), document["metadata"]["name"]
    if not cluster:
        return
    if cluster.get("authOptions", {}).get("mode") != "token" or "secretName" not in cluster["authOptions"]:
        yield f"{name}: the cluster lets in everybody: authOptions must have mode token and a secretName"
    pinned = re.search(r"^ray==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[1]
    if cluster.get("rayVersion") != pinned:
        yield f"{name}: rayVersion {cluster.get('rayVersion')} is not that of constraints.txt, {pinned}"
    policies = [one["spec"] for one in documents if one.get("kind") == "NetworkPolicy"]
    for group, spec in groups(cluster).items():
        template, pod = spec["template"], spec["template"]["spec"]
        labels = template.get("metadata", {}).get("labels", {}).items()
        if not any(_closes(policy) and policy["podSelector"]["matchLabels"].items() <= labels for policy in policies):
            yield f"{name}: no NetworkPolicy closes the ports of {group} to others"
        (container,) = pod["containers"]
        gpus = "nvidia.com/gpu" in container["resources"]["limits"]
        if container["image"] != ("raytf-cuda" if gpus else "raytf"):
            yield f"{name}: the image of {group}, {container['image']}, is none that kustomization.yaml sets"
        command = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["", "0"])
        if command[0] != "/opt/raytf/drain.sh" or int(command[1]) + 10 > pod.get("terminationGracePeriodSeconds", 30):
            yield f"{name}: {group} must be drained before it ends, 10 s before terminationGracePeriodSeconds"
        mounted = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        shm = next((v for v in pod["volumes"] if v["name"] == mounted.get("/dev/shm")), {}).get("emptyDir", {})
        if shm.get("medium") != "Memory" or _quantity(shm.get("sizeLimit", "0")) < MIN_SHM:
            yield f"{name}: {group} needs a /dev/shm in memory of {MIN_SHM >> 20} MiB or more"
    job = document["spec"].get("jobTemplate", document["spec"])
    if "entrypoint" in job:
        yield from (f"{name}: {text}" for text in _command(job, cluster, document["kind"], set(mounted)))


def _closes(policy: dict) -> bool:
    """Whether a policy lets in the pods that it selects to all ports, and others to Ray's dashboard alone."""
    own, others = {"podSelector": policy["podSelector"]}, [{"port": 8265, "protocol": "TCP"}]
    return "Ingress" in policy["policyTypes"] and all(
        rule.get("from") == [own] or rule.get("ports") == others for rule in policy["ingress"]
    )


def _command(job: dict, cluster: dict, kind: str, mounted: set[str]) -> Iterator[str]:
    words = job["entrypoint"].split()
    script = (ROOT / words[1].removeprefix("/opt/raytf/")).read_text()
    unknown = [word for word in words if word.startswith("--") and f'"{word}"' not in script]
    if unknown:
        yield f"the command has options that its script has not: {', '.join(unknown)}"
    given = dict(zip(words[2::2], words[3::2], strict=True))
    if not any(given.get("--storage", "").startswith((f"{path}/", "s3://")) for path in mounted):
        yield f"--storage {given.get('--storage')} is on no volume that all pods mount"
    if kind == "RayJob" and job.get("backoffLimit") and "--name" not in given:
        yield "a retry resumes a run that has a --name"
    if kind == "RayJob" and int(given.get("--num-workers", 1)) > groups(cluster)["workers"]["replicas"]:
        yield f"--num-workers {given['--num-workers']} is more than the group of workers has pods"
    limits = groups(cluster)["workers"]["template"]["spec"]["containers"][0]["resources"]["limits"]
    if kind == "RayJob" and given.get("--cpus-per-worker") != limits["cpu"]:
        yield f"a pod has {limits['cpu']} CPUs, and its worker {given.get('--cpus-per-worker', 1)}"
