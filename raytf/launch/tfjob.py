"""Converts a Kubeflow TFJob's YAML to arguments of `raytf run`: replicas, commands and variables. Driver side.

Over 500 lines: the fields of one format, most of which refuse something with a sentence of their own.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import yaml

from raytf.errors import ConfigError
from raytf.launch.spec import RoleSpec

# TFJob's names of roles in lower case, and TensorFlow's. A Master is a chief of TensorFlow 1.
_ROLES = {"chief": "chief", "master": "chief", "worker": "worker", "ps": "ps", "evaluator": "evaluator"}
_CONTAINER = "tensorflow"
# Kubernetes' names of what Ray counts as a GPU, and devices of networks, which Ray does not place.
_GPUS = ("nvidia.com/gpu", "amd.com/gpu")
_OF_NETWORK = re.compile(r"rdma|infiniband|/efa$")
# A quantity of Kubernetes, and the powers of ten and of 1024 of its suffixes.
_QUANTITY = re.compile(r"([+-]?)([0-9]+\.?[0-9]*|\.[0-9]+)(?:([numkMGTPE]|[KMGTPE]i)|[eE]([+-]?[0-9]+))?")
_POWERS = {"n": -9, "u": -6, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_POWERS_OF_1024 = {"Ki": 1, "Mi": 2, "Gi": 3, "Ti": 4, "Pi": 5, "Ei": 6}
# Restarts of a restartPolicy without backoffLimit, under which Kubernetes restarts forever.
_RESTARTS = 3
_PYTHON = re.compile(r"(.*/)?python[\d.]*")
# Options of Python: a script's output is not buffered anyway. Others are named; some take the next word.
_UNBUFFERED, _WITH_WORD = "-u", ("-W", "-X")
# Words in quotes that a shell and `shlex` read alike, and what a shell does with text outside of them: operators,
# values, patterns, comments, home folders, lists in braces.
_QUOTED = re.compile(r"""'[^']*'|"(?:[^"\\$`]|\\[^$`\n])*"|\\[^\n]""")
_OF_SHELL = re.compile(r"[;&|<>()$`*?\n]|\[\S+\]|(^|\s)#|(^|[\s=:])~|\{\S*(,|\.\.)\S*\}")
# Parts of a shell's text: quoted, escaped, or a variable outside of quotes; and a variable in double quotes.
_PARTS = re.compile(r"""'[^']*'|"(?:[^"\\]|\\.)*"|\\.|\$(?:\{[A-Za-z_]\w*\}|[A-Za-z_]\w*)""", re.DOTALL)
_VARIABLE = re.compile(r"\\.|\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))", re.DOTALL)
# A value that a shell leaves as it is without quotes.
_PLAIN = re.compile(r"[\w@%+=:,./-]+")
# What may precede a command: `set` with options, a folder, and variables of the command.
_WORD = r"""(?:[^\s'"\\;&|<>()$`*?#~]|'[^']*'|"[^"\\$`]*")+"""
_SETS = re.compile(r"\s*set((?:\s+[-+]\w+|\s+pipefail)+)\s*(?:;|&&|\n)")
_FOLDER = re.compile(rf"\s*cd\s+({_WORD})\s*(?:;|&&|\n)")
_ASSIGNED = re.compile(rf"\s*([A-Za-z_]\w*)=({_WORD}|)(?=\s)")
# Parts of a shell's text in which a backslash at a line end joins lines, or (in single quotes) does not.
_CONTINUED = re.compile(r"""'[^']*'|\\\n|"(?:[^"\\]|\\.)*"|\\.""", re.DOTALL)
# What the public images of the training operator run, by image: their ENTRYPOINT, and whether they have Keras 2.
_IMAGES = {
    "kubeflow/tf-mnist-with-summaries": ("python /var/tf_mnist/mnist_with_summaries.py", False),
    "kubeflow/tf-dist-mnist-test": ("python /var/tf_dist_mnist/dist_mnist.py", True),
    "kubeflow/tf-multi-worker-strategy": (
        "python /multi_worker_strategy-with-keras.py --saved_model_dir /train/saved_model/ "
        "--checkpoint_dir /train/checkpoint",
        True,
    ),
}
# Fields that are read; a line reports each other one as not honoured, and why.
_READ = {
    "spec": {"tfReplicaSpecs", "runPolicy", "successPolicy", "backoffLimit"},
    "runPolicy": {"backoffLimit"},
    "replica": {"replicas", "restartPolicy", "template"},
    "template": {"spec"},
    "pod": {"containers", "restartPolicy"},
    "container": {"name", "command", "args", "env", "resources"},
    "resources": {"cpu", *_GPUS},
}
_RAYS_NODES = "Ray places the processes; start Ray on the nodes that are meant"
_BY_HAND = "set them by --env NAME=VALUE"
_WHY = {
    "image": "the processes run in the Python of Ray's nodes; install there what the image has",
    "volumes": "mount on Ray's nodes what the script opens",
    "volumeMounts": "the script opens the same paths on Ray's nodes",
    "memory": "Ray's nodes must have it",
    "ports": "raytf picks free ones (--ports)",
    "workingDir": "the script runs in the current folder",
    "envFrom": _BY_HAND,
    "valueFrom": _BY_HAND,
    "initContainers": "do what they do before",
    "sidecars": "containers next to tensorflow are not started",
    "cleanPodPolicy": "every process ends with the run",
    "activeDeadlineSeconds": "end the run by `timeout`, or by the job that it is in",
    "schedulingPolicy": "all processes get their resources together, or wait",
    "suspend": "the run starts",
    "managedBy": "raytf run starts the processes itself",
    "terminationGracePeriodSeconds": "a process that is stopped has 5 s after SIGTERM",
    "enableDynamicWorker": "the number of workers is fixed",
    **dict.fromkeys(("nodeSelector", "affinity", "tolerations", "nodeName", "schedulerName"), _RAYS_NODES),
}


def read_tfjob(
    path: str, script: str | None, arguments: Sequence[str], variables: Mapping[str, str] | None = None
) -> tuple[dict[str, Any], list[str]]:
    """Reads the TFJob of a file.

    Args:
        path: Path of the YAML file; documents of other kinds in it are skipped.
        script: Script instead of the container's, or of the image's entrypoint; None uses the command's.
        arguments: Arguments of that script, before those of the YAML.
        variables: Variables of the command line, which precede those of the YAML in `$(NAME)`.

    Returns:
        Arguments of `LaunchSpec`, and a sentence for each field that is not honoured.

    Raises:
        ConfigError: The file is no TFJob that can run; the message contains the place in it.
    """
    job = _document(path)
    unread = _UnreadFields()
    spec = _require_map(job, "spec", "the TFJob")
    policy = _require_map(spec, "runPolicy", "spec", {})
    if "backoffLimit" in spec:  # where the first versions had it
        policy = {"backoffLimit": spec["backoffLimit"], **policy}
    unread.note("spec", spec, "the TFJob")
    unread.note("runPolicy", policy, "runPolicy")
    replicas = _replicas(spec)
    counts = {role: count for role, replica in replicas.items() if (count := _count(role, replica))}
    replicas = {role: replicas[role] for role in counts}
    if "ps" in counts and "chief" not in counts and counts.get("worker", 0) > 1:
        unread.remark("without a Chief, worker 0 is the chief, which coordinates the parameter servers")
        replicas, counts = {"chief": replicas["worker"], **replicas}, {**counts, "chief": 1}
        counts["worker"] -= 1
    cluster = _cluster(counts)
    _note_success(spec, bool(cluster["num_ps"]), unread)
    specs, scripts, keras_2 = {}, {}, False
    for role, replica in replicas.items():
        container = _container(role, replica, unread)
        keras_2 |= _of_image(container)[1]
        scripts[role], specs[role] = _role(role, container, script, arguments, variables or {}, unread)
    for name, module in scripts.values():
        if script is None and not module and not os.path.isfile(name):
            raise _config_error(
                "The script of the command must be here",
                name,
                f"Name it here, --tfjob {path} SCRIPT, or run the command where it is, by `ray job submit`",
            )
    first = next(role for role in ("chief", "worker") if role in scripts)
    name, module = scripts[first]
    options = {
        "script": name,
        "module": module,
        **cluster,
        "max_restarts": _restarts(replicas, policy, unread),
        "cpus_per_worker": specs["worker" if "worker" in specs else "chief"].cpus,
        "of_roles": specs,
    }
    if keras_2:
        options["legacy_keras"] = True
    return options, unread.sentences()


def with_resources(
    options: Mapping[str, Any], cpus_per_worker: float | None = None, gpus_per_worker: int | None = None
) -> dict[str, Any]:
    """Returns arguments of `LaunchSpec` with other resources than the TFJob's, as to try a job of GPUs on CPUs.

    Args:
        options: Those of `read_tfjob`.
        cpus_per_worker: CPUs of each process; None keeps the TFJob's.
        gpus_per_worker: GPUs of each process that trains or evaluates; None keeps the TFJob's.
    """
    changed = {}
    for role, spec in options["of_roles"].items():
        fields: dict[str, Any] = {}
        if cpus_per_worker is not None:
            fields |= {"cpus": cpus_per_worker, "threads": 0}
        if gpus_per_worker is not None:
            fields["gpus"] = gpus_per_worker if role in ("worker", "evaluator") or not options["num_ps"] else 0
        changed[role] = dataclasses.replace(spec, **fields)
    cpus = options["cpus_per_worker"] if cpus_per_worker is None else cpus_per_worker
    return {**options, "cpus_per_worker": cpus, "of_roles": changed}


# ----------------------------------------------------------------------------------------------------- the job


class _Loader(yaml.SafeLoader):
    """Reads scalars as `kubectl` does; refuses a key that a map has twice, of which YAML keeps the last one.

    `kubectl` reads YAML by sigs.k8s.io/yaml, into types of JSON. Dates and times are texts, `y` is a boolean, and `1e1`
    is a number.
    """

    yaml_implicit_resolvers: ClassVar[dict] = {}

    def compose_mapping_node(self, anchor):
        node = super().compose_mapping_node(anchor)
        names: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in names:
                raise yaml.MarkedYAMLError(problem=f"{key.value} is twice in a map", problem_mark=key.start_mark)
            names.add(str(key.value))
        return node

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        """Returns a number as JSON carries it, in which 2.0 is 2."""
        text = self.construct_scalar(node).replace("_", "")
        if re.fullmatch(r"[-+]?0[0-7]+", text):
            text = text.replace("0", "0o", 1)
        try:
            return int(text, 0)
        except ValueError:
            value = float(re.sub(r"\.(?=[a-zA-Z])", "", text))  # .inf, .nan
        return int(value) if value.is_integer() and abs(value) < 1e21 else value


_BOOLS = "y|Y|yes|Yes|YES|on|On|ON|true|True|TRUE|n|N|no|No|NO|off|Off|OFF|false|False|FALSE"
_INT = "[-+]?(0[bB][01_]+|0[oO]?[0-7_]+|0[xX][0-9a-fA-F_]+|0|[1-9][0-9_]*)"
_FLOAT = r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
for _type, _pattern, _first in (
    ("bool", _BOOLS, "yYnNtTfFoO"),
    ("int", _INT, "-+0123456789"),
    ("float", _FLOAT, "-+.0123456789"),
    ("null", "~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("merge", "<<", "<"),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_type}", re.compile(f"(?:{_pattern})$"), list(_first))
for _type in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_type}", _Loader.construct_number)
_Loader.add_constructor("tag:yaml.org,2002:timestamp", _Loader.construct_yaml_str)
_Loader.bool_values = {**yaml.SafeLoader.bool_values, "y": True, "n": False}


def _document(path: str) -> dict:
    try:
        with open(path) as file:
            documents = [document for document in yaml.load_all(file, _Loader) if document is not None]
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise _config_error("--tfjob takes a YAML file", " ".join(str(error).split()), "Correct the file") from error
    jobs = [document for document in documents if isinstance(document, dict) and document.get("kind") == "TFJob"]
    if len(jobs) != 1:
        kinds = [
            document.get("kind") if isinstance(document, dict) else type(document).__name__ for document in documents
        ]
        raise _config_error("--tfjob takes a file with one TFJob", f"{path} with {kinds}", "Give kind: TFJob, alone")
    version = str(jobs[0].get("apiVersion"))
    if not version.startswith("kubeflow.org/"):
        raise _config_error("apiVersion of a TFJob is kubeflow.org/v1", repr(version), "Set kubeflow.org/v1")
    return jobs[0]


def _replicas(spec: Mapping) -> dict[str, dict]:
    """Returns the replica specs by TensorFlow's role."""
    specs: dict[str, dict] = {}
    for name, replica in _require_map(spec, "tfReplicaSpecs", "spec").items():
        role = _ROLES.get(str(name).lower())
        if role is None:
            known = "Chief, Master, Worker, PS or Evaluator"
            raise _config_error(f"A replica of a TFJob is {known}", repr(name), "Correct the name in tfReplicaSpecs")
        if role in specs:
            raise _config_error(
                "A role must appear once in tfReplicaSpecs", f"{name} and another {role}", "Leave one out"
            )
        specs[role] = _require_map({name: replica}, name, "tfReplicaSpecs")
    if not specs:
        raise _config_error("tfReplicaSpecs names the replicas", "none", "Add a Worker")
    return specs


def _count(role: str, replica: Mapping) -> int:
    count = 1 if replica.get("replicas") is None else replica["replicas"]
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise _config_error(f"replicas of {role} is an integer of at least 0", repr(count), "Set 0 or more")
    if role in ("chief", "evaluator") and count > 1:
        raise _config_error(f"There is one {role} at most", count, "Set its replicas to 1")
    return count


def _cluster(counts: Mapping[str, int]) -> dict[str, Any]:
    """Returns the numbers of tasks as arguments of `LaunchSpec`."""
    chief, workers, servers = (counts.get(role, 0) for role in ("chief", "worker", "ps"))
    if servers and not (chief and workers):
        raise _config_error(
            "In TensorFlow 2, parameter servers need a Chief that coordinates, and a Worker",
            ", ".join(counts),
            "Add the one that is missing to tfReplicaSpecs",
        )
    if not chief and not workers:
        raise _config_error("A TFJob has a Chief or a Worker", ", ".join(counts) or "none", "Add one to tfReplicaSpecs")
    number = workers if servers else workers + chief
    evaluator = bool(counts.get("evaluator"))
    return {"num_workers": number, "num_ps": servers, "chief": bool(chief and not servers), "evaluator": evaluator}


def _note_success(spec: Mapping, has_servers: bool, unread: _UnreadFields) -> None:
    policy = spec.get("successPolicy") or ""
    if policy not in ("", "AllWorkers"):
        raise _config_error("successPolicy is AllWorkers, or absent", repr(policy), "Set AllWorkers, or leave it out")
    if policy and has_servers:
        unread.add("successPolicy AllWorkers", "", "with parameter servers the run ends with the chief")


def _restarts(replicas: Mapping[str, Mapping], policy: Mapping, unread: _UnreadFields) -> int:
    of_roles = {role: str(replica.get("restartPolicy") or "Never") for role, replica in replicas.items()}
    policies = set(of_roles.values())
    if unknown := policies - {"Never", "OnFailure", "Always", "ExitCode"}:
        raise _config_error(
            "restartPolicy is Never, OnFailure, Always or ExitCode", ", ".join(sorted(unknown)), "Set one of these"
        )
    limit = policy.get("backoffLimit")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 0):
        raise _config_error("backoffLimit is an integer of at least 0", repr(limit), "Set 0 or more")
    if policies == {"Never"}:
        return 0
    for role, name in of_roles.items():
        if name == "Never":
            unread.add("restartPolicy Never", role, "every failure is restarted, as other roles ask for restarts")
    if "ExitCode" in policies:
        unread.add("restartPolicy ExitCode", "", "every failure is restarted, whatever its exit code")
    if limit is None:
        unread.add("restartPolicy without backoffLimit", "", f"{_RESTARTS} restarts at most (--max-restarts)")
    return _RESTARTS if limit is None else limit


# ------------------------------------------------------------------------------------------------ a container


def _container(role: str, replica: Mapping, unread: _UnreadFields) -> dict:
    """Returns the container named tensorflow of a replica."""
    unread.note("replica", replica, role)
    template = _require_map(replica, "template", role)
    unread.note("template", template, f"template of {role}")
    pod = _require_map(template, "spec", f"template of {role}")
    unread.note("pod", pod, role)
    containers = pod.get("containers")
    if not isinstance(containers, list) or not all(isinstance(entry, dict) for entry in containers):
        raise _config_error(f"containers of {role} is a list of maps", repr(containers), "Write it as a list of maps")
    named = [entry for entry in containers if entry.get("name") == _CONTAINER]
    if len(named) != 1:
        names = [entry.get("name") for entry in containers]
        raise _config_error(f"One container of {role} has the name {_CONTAINER}", names, "Rename the one that trains")
    if len(containers) > 1:
        unread.add("sidecars", role)
    unread.note("container", named[0], role)
    return named[0]


def _role(
    role: str,
    container: Mapping,
    script: str | None,
    arguments: Sequence[str],
    variables: Mapping[str, str],
    unread: _UnreadFields,
) -> tuple[tuple[str, bool], RoleSpec]:
    """Returns ((script, whether it is a module), spec of the role)."""
    environment = _environment(role, container, variables, unread)
    known = {**environment, **variables}
    command, more = (_command_words(container, key, role, known) for key in ("command", "args"))
    chosen, module, role_arguments = script, False, []
    entrypoint, legacy = _of_image(container)
    if entrypoint and not command and not (more and _PYTHON.fullmatch(more[0])):
        unread.remark(f"its image runs {entrypoint}{', with Keras 2' if legacy else ''}")
        command = entrypoint.split()
    if command or (more and _PYTHON.fullmatch(more[0])):  # an image without an entrypoint runs args
        words, assigned, folder = _unwrapped([*command, *more], known)
        environment |= {name: value for name, value in assigned.items() if name not in variables}
        try:
            chosen, module, role_arguments = _of_python(role, words, unread)
            if folder:
                unread.add(f"cd {folder}", role, _WHY["workingDir"])
                inside = os.path.join(folder, chosen)
                chosen = inside if not module and not os.path.isfile(chosen) and os.path.isfile(inside) else chosen
        except ConfigError:
            if script is None:
                raise
            unread.add("command", role, f"{script} runs in its place, without a word of it: {shlex.join(words)}")
    elif script is None:
        raise _config_error(
            "The YAML does not say what its image runs",
            f"no command of {role}",
            "Name the script, and options that the image's entrypoint gives it, after the file: --tfjob FILE SCRIPT",
        )
    else:
        role_arguments = more
    if script is not None:
        chosen, module = script, False
    return (chosen, module), RoleSpec(
        arguments=(*arguments, *role_arguments),
        environment=environment,
        script=chosen,
        module=module,
        **_resources(role, container, unread),
    )


def _command_words(container: Mapping, key: str, role: str, environment: Mapping[str, str]) -> list[str]:
    """Returns the words of a command with the values of $(NAME), as Kubernetes fills them in."""
    words = container.get(key) or []
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise _config_error(f"{key} of {role} is a list of texts", repr(words), "Write each word in quotes")

    return [_filled(word, environment) for word in words]


def _filled(text: str, environment: Mapping[str, str]) -> str:
    """Returns a text with the values of $(NAME); $$(NAME) becomes $(NAME), and unknown names stay."""

    def value(match: re.Match) -> str:
        return match[0][1:] if match[0].startswith("$$") else environment.get(match[1], match[0])

    return re.sub(r"\$?\$\(([-._a-zA-Z0-9]+)\)", value, text)


def _unwrapped(words: list[str], known: Mapping[str, str]) -> tuple[list[str], dict[str, str], str]:
    """Returns the command inside `sh -c`, if it needs no feature of a shell, its own variables, and its folder.

    Otherwise the words are returned as they are.

    Args:
        words: The command.
        known: Variables of the process, which the shell fills in.
    """
    as_it_is: tuple[list[str], dict[str, str], str] = words, {}, ""
    if (given := _text_of_shell(words)) is None:
        return as_it_is
    text, folder, assigned = _PARTS.sub(lambda part: _with_values(part[0], known), given), "", {}
    while match := _SETS.match(text) or _FOLDER.match(text):
        if match.re is _FOLDER:
            folder = os.path.join(folder, *shlex.split(match[1]))
        text = text[match.end() :]
    while match := _ASSIGNED.match(text):
        assigned[match[1]] = "".join(shlex.split(match[2]))
        text = text[match.end() :]
    if _OF_SHELL.search(_QUOTED.sub("quoted", text.strip())):
        return as_it_is
    try:
        inner = shlex.split(text)
    except ValueError:  # a quote without its end
        return as_it_is
    inner = inner[1:] if inner[:1] == ["exec"] else inner
    return (inner, assigned, folder) if inner else as_it_is


def _text_of_shell(words: list[str]) -> str | None:
    """Returns the text that a command gives to a shell by `-c`, with lines joined; None for other commands."""
    if os.path.basename(words[0]) not in ("sh", "bash"):
        return None
    remaining, flags = words[1:], ""
    while remaining and re.fullmatch(r"-[celuxo]+", remaining[0]):
        flags += (last := remaining.pop(0))
        if "o" in last and remaining:
            remaining.pop(0)  # its word: pipefail
    return _CONTINUED.sub(_join_lines, remaining[0]) if "c" in flags and len(remaining) == 1 else None


def _with_values(part: str, known: Mapping[str, str]) -> str:
    """Returns a part of a shell's text with the values of its variables.

    Unknown ones stay, and values that a shell would change.
    """

    def value(match: re.Match) -> str:
        text = known.get(match[1] or match[2] or "")
        if text is None or (not quoted and not _PLAIN.fullmatch(text)) or re.search(r"[$`\n]", text):
            return match[0]
        return text.replace("\\", "\\\\").replace('"', '\\"') if quoted else text

    quoted = part.startswith('"')
    return _VARIABLE.sub(value, part) if quoted or part.startswith("$") else part


def _of_image(container: Mapping) -> tuple[str, bool]:
    """Returns what a container's image runs, if that is known, and whether it has Keras 2."""
    name = re.sub(r":[^/]*$", "", str(container.get("image") or "").partition("@")[0])  # without tag and digest
    return _IMAGES.get(name.removeprefix("docker.io/"), ("", False))


def _join_lines(match: re.Match) -> str:
    """Returns a part of a shell's text without backslashes at line ends, which single quotes alone keep."""
    if match[0].startswith("'"):
        return match[0]
    return re.sub(r"\\(.)", lambda escape: "" if escape[1] == "\n" else escape[0], match[0], flags=re.DOTALL)


def _of_python(role: str, words: list[str], unread: _UnreadFields) -> tuple[str, bool, list[str]]:
    """Returns (script, whether it is a module, arguments) of a command that starts Python."""
    remaining = list(words)
    if _PYTHON.fullmatch(remaining[0]):
        remaining.pop(0)
        while remaining and re.fullmatch(r"-[a-zA-Z].*", remaining[0]) and remaining[0] not in ("-m", "-c"):
            option = remaining.pop(0)
            if option in _WITH_WORD and remaining:
                option += f" {remaining.pop(0)}"
            if option != _UNBUFFERED:
                unread.add(f"python's {option}", role, "the processes are Ray's; set variables such as PYTHONWARNINGS")
        if len(remaining) > 1 and remaining[0] == "-m":
            return remaining[1], True, remaining[2:]
    if not remaining or remaining[0].startswith("-") or not remaining[0].endswith(".py"):
        raise _config_error(
            f"The command of {role} starts a Python script or module",
            shlex.join(words),
            "Name the script after the file: --tfjob FILE SCRIPT",
        )
    return remaining[0], False, remaining[1:]


def _environment(role: str, container: Mapping, variables: Mapping[str, str], unread: _UnreadFields) -> dict[str, str]:
    entries, values = container.get("env") or [], {}
    if not isinstance(entries, list) or not all(
        isinstance(item, dict) and isinstance(item.get("name"), str) for item in entries
    ):
        raise _config_error(
            f"env of {role} is a list of names and values, each name a text",
            repr(entries),
            "Write entries such as {name: A, value: b}",
        )
    for entry in entries:
        value = "" if entry.get("value") is None else entry["value"]
        if entry["name"] == "TF_CONFIG":
            unread.add("TF_CONFIG in env", role, "raytf sets it for each process")
        elif entry.get("valueFrom") is not None:
            if entry["name"] not in variables:
                unread.add("valueFrom", f"{entry['name']} of {role}")
        elif not isinstance(value, str):
            raise _config_error(
                f"The value of {entry['name']} in env of {role} is a text", repr(value), "Put it in quotes"
            )
        else:
            values[entry["name"]] = _filled(value, {**values, **variables})  # of those before it
    return values


def _resources(role: str, container: Mapping, unread: _UnreadFields) -> dict[str, Any]:
    resources = _require_map(container, "resources", role, {})
    requests, limits = (_require_map(resources, part, role, {}) for part in ("requests", "limits"))
    amounts = {**requests, **{name: amount for name, amount in limits.items() if amount is not None}}
    quantities = {name: _quantity(role, name, amount) for name, amount in amounts.items() if amount is not None}
    for name, quantity in quantities.items():
        if "/" not in name:
            unread.note("resources", {name: quantity}, role)
        elif name in _GPUS and quantity != int(quantity):
            raise _config_error(f"{name} of {role} is a whole number", repr(amounts[name]), "Set a whole number")
        elif quantity and name not in _GPUS and not _OF_NETWORK.search(name):
            raise _config_error(
                f"A device that raytf run places is {' or '.join(_GPUS)}, Ray's GPU",
                f"{name} of {role}",
                "Leave it out, or write nvidia.com/gpu if Ray counts it as a GPU",
            )
        elif quantity and name not in _GPUS:
            unread.add(name, role, "Ray's nodes must have it")
    # Kubernetes places by requests, which are the limits where there are none.
    requested = requests.get("cpu")
    cores = quantities.get("cpu", 0) if requested is None else _quantity(role, "cpu", requested)
    if cores == 0 and "cpu" in quantities:
        unread.add("cpu 0", role, "a process has 1 CPU")
    cpus = math.ceil(round(cores * 1000, 6)) / 1000 or 1.0  # as Kubernetes rounds up
    return {
        "cpus": cpus,
        "threads": max(cpus, quantities.get("cpu", 0)),
        "gpus": sum(int(quantities.get(name, 0)) for name in _GPUS),
    }


def _quantity(role: str, name: str, amount) -> float:
    match = _QUANTITY.fullmatch(str(amount))
    power = (match[4] or _POWERS.get(match[3], 0)) if match else 0
    value = float(f"{match[1]}{match[2]}e{power}") * 1024 ** _POWERS_OF_1024.get(match[3], 0) if match else math.inf
    if math.isinf(value):
        raise _config_error(
            f"{name} of {role} is a quantity such as 2 or 500m",
            repr(amount),
            "Set a number, or one with a unit (m, k, M, G, Ki, Mi, Gi)",
        )
    if value < 0:
        raise _config_error(f"{name} of {role} is at least 0", repr(amount), "Set 0 or more")
    return value


# ------------------------------------------------------------------------------------------------------ others


class _UnreadFields:
    """Fields that are not honoured, and their places."""

    def __init__(self):
        self._by_reason: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
        self._remarks: list[str] = []

    def note(self, kind: str, values: Mapping, location: str) -> None:
        """Records the fields of a map that are not read."""
        for name, value in values.items():
            if name not in _READ[kind] and value is not None:
                self.add(str(name), location)

    def add(self, field: str, owner: str, why: str = "") -> None:
        """Records a field."""
        why = why or _WHY.get(field, "it is of Kubernetes' pods alone")
        if owner not in self._by_reason[field, why]:
            self._by_reason[field, why].append(owner)

    def remark(self, text: str) -> None:
        """Records how a field is read, where that is not obvious."""
        if (remark := f"--tfjob: {text}") not in self._remarks:
            self._remarks.append(remark)

    def sentences(self) -> list[str]:
        """Returns the remarks, and a sentence for each field."""
        unread = sorted(self._by_reason.items())
        return self._remarks + [
            f"--tfjob: {field}{' of ' if any(fields) else ''}{', '.join(fields)} is not honoured: {why}"
            for (field, why), fields in unread
        ]


def _require_map(values: Mapping, key: str, owner: str, default: dict | None = None) -> dict:
    value = values.get(key, default)
    if value is None and default is not None:
        value = default
    if not isinstance(value, dict):
        raise _config_error(f"{key} of {owner} is a map", "none" if value is None else repr(value), "Correct the TFJob")
    return value


def _config_error(rule: str, received: object, fix: str) -> ConfigError:
    return ConfigError(f"--tfjob: {rule}" if not rule.startswith("--tfjob") else rule, received, fix)
