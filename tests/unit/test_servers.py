"""What becomes of a group of parameter servers and their workers when one of them is lost."""

from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import ActorUnschedulableError, RayTaskError

from raytf.parameter_server import servers
from raytf.runtime import ports
from raytf.runtime.answers import NoAnswerError
from raytf.runtime.roles import Task

UNREADABLE = RayTaskError("serve", "a traceback", FileNotFoundError("no rows here"))


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (None, "replaced: 3 processes in its place died at their start"),
        (UNREADABLE, "replaced: FileNotFoundError: no rows here"),
        (UNREADABLE.as_instanceof_cause(), "replaced: FileNotFoundError: no rows here"),
        (ActorUnschedulableError("no node"), "replaced: ActorUnschedulableError: .*no node"),
        (NoAnswerError(["worker 0"], 1, "a worker"), "replaced: timeout after 1 s"),
    ],
)
def test_a_worker_that_cannot_be_replaced_ends_the_group(error, why, monkeypatch):
    """A coordinator waits for it otherwise, and nobody watches the others."""
    worker = Task("worker", 0)

    def start(group, chief):
        group._actors = {worker: SimpleNamespace(join=SimpleNamespace(remote=object))}
        group.cluster = {"worker": ["worker:1"]}

    def replace(group, task):
        if error is not None:
            raise error
        return False

    monkeypatch.setattr(ray, "wait", lambda refs: (refs, []))
    monkeypatch.setattr(ports, "close_connections", lambda address: None)
    monkeypatch.setattr(servers, "ProcessKiller", lambda: SimpleNamespace(ended={}))
    monkeypatch.setattr(servers.ServerGroup, "_start", start)
    monkeypatch.setattr(servers.ServerGroup, "_replace", replace)
    group = servers.ServerGroup(SimpleNamespace(tasks=lambda: [worker], group=True), "chief:1", None)
    assert group.changed.wait(10)
    with pytest.raises(servers.ServerLostError, match=f"worker 0 was lost, and could not be {why}"):
        group.check()
