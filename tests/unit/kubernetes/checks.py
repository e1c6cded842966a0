"""What Kubernetes, KubeRay and its operator would refuse of a manifest, and what raytf needs, without a cluster."""

from __future__ import annotations

import functools
import json
import lzma
import pathlib
import re
import shlex
import sys
from collections.abc import Iterator, Mapping

import celpy
import jsonschema
import kubernetes_validate
import yaml
from ray.runtime_env import RuntimeEnv
from ray.scripts import scripts

from raytf import cli
from raytf.doctor.findings import MIN_SHM

KUBERNETES = "1.32"
ROOT = pathlib.Path(__file__).parents[3]
FOLDER = ROOT / "cluster" / "kubernetes"
_CRDS = pathlib.Path(__file__).with_name("kuberay-1.7.0.json.xz")


def refusals(documents: list[dict], images: Mapping[str, str] | None = None) -> list[str]:
    """What would refuse the documents of a file, each with its place; empty where nothing would.

    Args:
        documents: those of a file, or what kustomize makes of all files.
        images: what kustomize makes of an image's name; by default the name itself.
    """
    found = []
    for document in documents:
        name = f"{document.get('kind')}/{document.get('metadata', {}).get('name')}"
        own = _kuberay if document.get("apiVersion") == "ray.io/v1" else _kubernetes
        found += [f"{name}: {text}" for text in own(document)]
    clustered = [document for document in documents if document.get("kind") in _schemas()]
    images = {"raytf": "raytf", "raytf-cuda": "raytf-cuda"} if images is None else images
    return found or [text for document in clustered for text in _own(document, documents, images)]


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


def templates(document: dict) -> dict[str, dict]:
    """The templates of all pods of a document of KubeRay: those of its cluster, and the submitter if it has one."""
    found = {name: group["template"] for name, group in groups(clusters(document)).items()}
    submitter = _job(document).get("submitterPodTemplate")
    return found | ({"submitter": submitter} if submitter else {})


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
    for name, template in templates(document).items():
        pod = {"apiVersion": "v1", "kind": "Pod", **template}
        yield from (f"{name}: {text}" for text in (*_kubernetes(pod), *_pod(pod["spec"])))
    yield from _operator(document, clusters(document))


def _job(document: dict) -> dict:
    """The spec of the RayJob of a document, which a RayCluster has not."""
    return document["spec"].get("jobTemplate", document["spec"])


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
    for toleration in spec.get("tolerations", ()):
        if (effect := toleration.get("effect", "NoExecute")) not in ("NoSchedule", "PreferNoSchedule", "NoExecute"):
            yield f"a toleration has the effect {effect!r}, which no taint has"


def _quantity(text) -> float:
    number, unit = re.fullmatch(r"([\d.]+)(\D*)", str(text)).groups()
    return float(number) * {"": 1, "m": 1e-3, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}[unit]


def _operator(document: dict, cluster: dict) -> Iterator[str]:
    """What KubeRay's operator refuses: `controllers/ray/utils/validation.go` of 1.7."""
    name, spec = document["metadata"]["name"], document["spec"]
    job = _job(document)
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
    if job.get("submissionMode") == "SidecarMode" and "submitterPodTemplate" in job:
        yield "SidecarMode does not support submitterPodTemplate"
    if job.get("ttlSecondsAfterFinished") and not job.get("shutdownAfterJobFinishes"):
        yield "ttlSecondsAfterFinished needs shutdownAfterJobFinishes"
    if document["kind"] == "RayCronJob":
        yield from _schedule(spec["schedule"])
    try:
        if not isinstance(yaml.safe_load(job.get("runtimeEnvYAML", "{}")), dict):
            yield "runtimeEnvYAML is no map"
    except yaml.YAMLError as error:
        yield f"runtimeEnvYAML is no YAML: {' '.join(str(error).split())}"


def _schedule(text: str) -> Iterator[str]:
    """Of cron: minute, hour, day, month and day of the week, each a list of ranges with or without steps."""
    fields, ranges = text.split(), ((0, 59), (0, 23), (1, 31), (1, 12), (0, 6))
    if len(fields) != len(ranges):
        yield f"schedule {text!r} has not five fields"
        return
    for field, (least, most) in zip(fields, ranges, strict=True):
        for part in field.split(","):
            match = re.fullmatch(r"(?:\*|(\d+)(?:-(\d+))?)(?:/[1-9]\d*)?", part)
            numbers = [int(number) for number in match.groups() if number] if match else [most + 1]
            if not all(least <= number <= most for number in numbers) or numbers != sorted(numbers):
                yield f"{part!r} of schedule {text!r} is not within {least} to {most}"


# ------------------------------------------------------------------------------------------ what raytf asks for

_RESOURCES = {"cpu", "memory", "nvidia.com/gpu"}
_OPERATOR = {
    "namespaceSelector": {},
    "podSelector": {"matchLabels": {"app.kubernetes.io/component": "kuberay-operator"}},
}


def _own(document: dict, documents: list[dict], images: Mapping[str, str]) -> Iterator[str]:
    """What no schema knows: token, ports, drain, shared memory, versions, resume, and the command."""
    cluster, name, kind = clusters(document), document["metadata"]["name"], document["kind"]
    if not cluster:
        return
    if (auth := cluster.get("authOptions", {})).get("mode") != "token" or "secretName" not in auth:
        yield f"{name}: the cluster lets in everybody: authOptions must have mode token and a secretName"
    elif auth["secretName"] != (made := _secret()):
        yield f"{name}: the token is in the Secret {made}, and not in {auth['secretName']}"
    pinned = re.search(r"^ray==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[1]
    if cluster.get("rayVersion") != pinned:
        yield f"{name}: rayVersion {cluster.get('rayVersion')} is not that of constraints.txt, {pinned}"
    if unclosed := [group for group, spec in groups(cluster).items() if not _is_closed(spec, documents)]:
        yield f"{name}: no NetworkPolicy closes the ports of {', '.join(unclosed)} to others"
    for group, spec in groups(cluster).items():
        yield from (f"{name}: {text}" for text in _group(group, spec, images))
    job = _job(document)
    yield from (f"{name}: {text}" for text in (*_restricted(document, cluster), *_submitter(job, kind, images)))
    if kind != "RayCluster" and not _leaves_dead_nodes(cluster["headGroupSpec"]["template"]["spec"]):
        yield f"{name}: the head must leave a dead node after 30 s: tolerations of not-ready and unreachable"
    if kind == "RayJob":
        yield from (f"{name}: {text}" for text in _resumes(job, document["metadata"].get("labels", {})))
    if "entrypoint" in job:
        yield from (f"{name}: {text}" for text in (*_runtime_env(job), *_command(job, cluster, kind)))


def _secret() -> str:
    page = (ROOT / "docs" / "guides" / "kubernetes.md").read_text()
    return re.search(r"kubectl create secret generic (\S+)", page)[1]


def _is_closed(group: dict, documents: list[dict]) -> bool:
    labels = group["template"].get("metadata", {}).get("labels", {}).items()
    policies = [one["spec"] for one in documents if one.get("kind") == "NetworkPolicy"]
    return any(_closes(policy) and policy["podSelector"]["matchLabels"].items() <= labels for policy in policies)


def _closes(policy: dict) -> bool:
    """Whether a policy lets in the pods that it selects, and to port 8265 alone the namespace and the operator."""
    own, others = {"podSelector": policy["podSelector"]}, ({"podSelector": {}}, _OPERATOR)
    return "Ingress" in policy["policyTypes"] and all(
        rule.get("from") == [own]
        or (
            rule.get("ports") == [{"port": 8265, "protocol": "TCP"}]
            and bool(rule.get("from"))
            and all(peer in others for peer in rule["from"])
        )
        for rule in policy["ingress"]
    )


def _group(group: str, spec: dict, images: Mapping[str, str]) -> Iterator[str]:
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    limits = container["resources"]["limits"]
    if unknown := limits.keys() - _RESOURCES:
        yield f"{group} asks for {', '.join(sorted(unknown))}, which no node has"
    if container["image"] != images.get("raytf-cuda" if "nvidia.com/gpu" in limits else "raytf"):
        yield f"the image of {group}, {container['image']}, is none that settings.yaml sets"
    command = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["", "0"])
    if command[0] != "/opt/raytf/drain.sh" or int(command[1]) + 10 > pod.get("terminationGracePeriodSeconds", 30):
        yield f"{group} must be drained before it ends, 10 s before terminationGracePeriodSeconds"
    if pod.get("securityContext", {}).get("fsGroupChangePolicy") != "OnRootMismatch":
        yield f"{group} walks its volumes at each start, without fsGroupChangePolicy: OnRootMismatch"
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounted = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    shm = mounted.get("/dev/shm", {}).get("emptyDir", {})
    if shm.get("medium") != "Memory" or _quantity(shm.get("sizeLimit", "0")) < MIN_SHM:
        yield f"{group} needs a /dev/shm in memory of {MIN_SHM >> 20} MiB or more"
    claim = yaml.safe_load((FOLDER / "storage.yaml").read_text())["metadata"]["name"]
    if (named := mounted.get("/shared", {}).get("persistentVolumeClaim", {}).get("claimName")) != claim:
        yield f"/shared of {group} is {named}, and storage.yaml has {claim}"
    options = {option.lstrip("-") for parameter in scripts.start.params for option in parameter.opts}
    if unknown := spec["rayStartParams"].keys() - options:
        yield f"ray start, which makes {group}, has no option {', '.join(sorted(unknown))}"


def _restricted(document: dict, cluster: dict) -> Iterator[str]:
    """What a namespace that enforces the Pod Security Standard restricted refuses, apart from fields that none has."""
    pods = {name: template["spec"] for name, template in templates(document).items()}
    containers = {name: (pod.get("securityContext", {}), pod["containers"][0]) for name, pod in pods.items()}
    if cluster.get("enableInTreeAutoscaling"):
        containers["autoscaler"] = (containers["head"][0], cluster.get("autoscalerOptions", {}))
    for name, (of_pod, container) in containers.items():
        own = of_pod | container.get("securityContext", {})
        if not own.get("runAsNonRoot") or own.get("seccompProfile", {}).get("type") != "RuntimeDefault":
            yield f"{name} needs runAsNonRoot and the seccompProfile RuntimeDefault"
        if own.get("allowPrivilegeEscalation") is not False or own.get("capabilities") != {"drop": ["ALL"]}:
            yield f"{name} needs allowPrivilegeEscalation: false, and all capabilities dropped"


def _submitter(job: dict, kind: str, images: Mapping[str, str]) -> Iterator[str]:
    template = job.get("submitterPodTemplate")
    if kind == "RayCronJob" and job.get("submissionMode", "K8sJobMode") == "K8sJobMode" and not template:
        yield "a submitterPodTemplate gives the pod that submits the job a securityContext"
    elif template and template["spec"]["containers"][0]["image"] != images.get("raytf"):
        yield "the image of the submitter is not that of the head"


def _leaves_dead_nodes(pod: dict) -> bool:
    taints = {"node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"}
    return taints == {
        toleration["key"]
        for toleration in pod.get("tolerations", ())
        if toleration.get("operator") == "Exists"
        and toleration.get("effect") == "NoExecute"
        and toleration.get("tolerationSeconds") == 30
    }


def _resumes(job: dict, labels: Mapping[str, str]) -> Iterator[str]:
    if job.get("submissionMode") != "SidecarMode":
        yield "a lost head fails the job, so that a new cluster resumes it, in submissionMode SidecarMode alone"
    if not job.get("backoffLimit"):
        yield "no retry resumes the job: backoffLimit must be 1 or more"
    if not labels.get("kueue.x-k8s.io/queue-name"):
        yield "Kueue finds its queue by the label kueue.x-k8s.io/queue-name"


def _runtime_env(job: dict) -> Iterator[str]:
    environment = yaml.safe_load(job.get("runtimeEnvYAML", "{}"))
    if unknown := environment.keys() - RuntimeEnv.known_fields:
        yield f"runtimeEnvYAML has what Ray does not know: {', '.join(sorted(unknown))}"
    elif not str(environment.get("env_vars", {}).get("RAY_JOB_STOP_WAIT_TIME_S", "")).isdecimal():
        yield "a stop waits for the step by RAY_JOB_STOP_WAIT_TIME_S in runtimeEnvYAML alone"


def words_of(entrypoint: str, cluster: dict) -> list[str]:
    """The words of an entrypoint, after the shell that submits it, and `sh -c` in the head's container.

    KubeRay gives it to a shell in a container of its own, which has none of the head's variables; Ray quotes the words.

    Raises:
        ValueError: a variable has no value where it is filled in.
    """
    words, quoted = shlex.split(entrypoint), re.compile(r"'[^']*'")
    if "$" in quoted.sub("", entrypoint):
        raise ValueError("the shell that submits the job has no variables: write sh -c '...' around the command")
    if words[:2] == ["sh", "-c"]:
        (head,) = cluster["headGroupSpec"]["template"]["spec"]["containers"]
        values = {variable["name"]: variable.get("value", "") for variable in head.get("env", ())}
        if unknown := set(re.findall(r"\$(\w+)", words[2])) - values.keys():
            raise ValueError(f"the head's container has no variable {', '.join(sorted(unknown))}")
        words = shlex.split(re.sub(r"\$(\w+)", lambda match: values[match[1]], words[2]))
    return words[1:] if words[0] == "exec" else words


def _command(job: dict, cluster: dict, kind: str) -> Iterator[str]:
    try:
        program, script, *words = words_of(job["entrypoint"], cluster)
    except ValueError as error:
        yield str(error)
        return
    words = [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]
    path = ROOT / script.removeprefix("/opt/raytf/")
    if program == "raytf":
        known = {option for parameter in cli.main.commands[script].params for option in parameter.opts}
    elif path.is_file():
        known = set(re.findall(r'"(--[-a-z]+)"', path.read_text()))
    else:
        yield f"the image has no {script}"
        return
    if unknown := [word for word in words if word.startswith("--") and word not in known]:
        yield f"the command has options that its script has not: {', '.join(unknown)}"
    given = {word: value for word, value in zip(words, [*words[1:], ""], strict=True) if word.startswith("--")}
    (container,) = cluster["headGroupSpec"]["template"]["spec"]["containers"]
    mounted = [mount["mountPath"] for mount in container["volumeMounts"]]
    if not any(given.get("--storage", "").startswith((f"{path}/", "s3://")) for path in mounted):
        yield f"--storage {given.get('--storage')} is on no volume that all pods mount"
    if kind == "RayJob" and "--name" not in given:
        yield "a retry resumes a run that has a --name"
    yield from _size(given, cluster, kind)


def _size(given: Mapping[str, str], cluster: dict, kind: str) -> Iterator[str]:
    """A worker for each pod of the kind that the command asks for, and of a training with all of its CPUs."""
    workers, gpus = given.get("--num-workers", "1"), given.get("--gpus-per-worker", "0") != "0"
    limits = [
        (group["replicas"], group["template"]["spec"]["containers"][0]["resources"]["limits"])
        for group in cluster["workerGroupSpecs"]
    ]
    pods = sum(number for number, limit in limits if ("nvidia.com/gpu" in limit) == gpus)
    if not workers.isdecimal() or int(workers) > pods:
        yield f"--num-workers {workers} is more than the {pods} pods for them"
    cpus = given.get("--cpus-per-worker", "1")
    if kind == "RayJob" and not cpus.isdecimal():
        yield f"--cpus-per-worker {cpus} is no whole number"
    elif kind == "RayJob" and (other := {limit["cpu"] for _, limit in limits} - {cpus}):
        yield f"a pod has {', '.join(sorted(other))} CPUs, and its worker {cpus}"


# ---------------------------------------------------------------------------------------------- kustomization.yaml


def kustomization(folder: pathlib.Path) -> list[str]:
    """What kustomize passes over: kinds and settings that nothing has; empty where all is well."""
    made = yaml.safe_load((folder / "kustomization.yaml").read_text())
    read = [list(yaml.safe_load_all((folder / name).read_text())) for name in made["resources"]]
    documents = [document for file in read for document in file]
    settings = next(one for one in documents if one["kind"] == "ConfigMap")["data"].keys()
    sources = {rule["source"]["fieldPath"].removeprefix("data.") for rule in made["replacements"]}
    kinds = {target["select"]["kind"] for rule in made["replacements"] for target in rule["targets"]}
    found = [f"no document is of kind {name}" for name in kinds - {document["kind"] for document in documents}]
    return found + [f"{name} is a setting on one side alone" for name in sources ^ settings]
