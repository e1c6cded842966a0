"""State at the level of modules: what a process is or has once, and nothing that a run, a model or a call has.

A name that a function rebinds or changes is state. Each has its reason here.
"""

import ast
import pathlib

import pytest

import raytf

FOLDER = pathlib.Path(raytf.__file__).parent
CHANGES = {"add", "append", "clear", "discard", "extend", "pop", "popitem", "popleft", "remove", "setdefault", "update"}
STATE = {
    "notes on objects of others, which vanish with the objects": {
        *("collectives/communicator.py:_sums", "collectives/exchange.py:_exchanges", "worker/dataset.py:_feeds"),
        *("collectives/gradient_ring.py:_sum_numbers", "parallel/local_sgd.py:_averaging_intervals"),
        *("worker/model_loading.py:_loaded_models", "parallel/assigned.py:_watches"),
        *(
            "parallel/double_writes.py:_recorders",
            "parallel/epoch_iterator.py:_newest",
            "compat/keras_objects.py:_made",
        ),
        *("collectives/ring.py:_rings", "compat/tensorflow.py:_releasing"),
    },
    "what is replaced in Keras, TensorFlow and Python for the whole process": {
        *("compat/patching.py:_overridden", "compat/patching.py:_replaced", "compat/patching.py:_warned_patches"),
        *("compat/fast_import.py:_active", "parallel/trainer.py:_installed", "compat/tensorflow.py:_registering"),
        *("parallel/double_writes.py:_hooked", "parallel/double_writes.py:_noted"),
        *("parallel/verbosity.py:_current", "parameter_server/rows.py:_registered"),
    },
    "the worker: its context, its connection to the others, its name, cores and ports": {
        *("worker/context.py:_context", "collectives/recovery_client.py:client", "console/output.py:_names"),
        *("collectives/ring_token.py:_token", "collectives/ring_token.py:_generation", "runtime/cores.py:_current"),
        *("runtime/ports.py:_claims", "runtime/ports.py:_reserved", "storage/run_lock.py:_acquired_locks"),
    },
    "who gets the lines and events of the process, and its terminal": {
        *("console/output.py:_listeners", "console/quiet.py:_restore", "console/quiet.py:_state"),
        *("events.py:_takers", "events.py:_logged_elsewhere"),
    },
    "what a warm worker keeps for its next training": {
        *("fitting/warm.py:_idle", "fitting/fit_worker.py:_models", "fitting/fit_training.py:_last_states"),
        *("parallel/compiled_update.py:_known", "worker/clearing.py:_noted"),
        "worker/model_source.py:_runs_of_process",
    },
    "what tests set": {"timeouts.py:_current", "storage/injected_faults.py:_numbers"},
}


def state_of(source: str) -> set[str]:
    """The names at the top of a module that its functions rebind or change."""
    tree = ast.parse(source)
    targets = [
        target
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    ]
    top = {target.id for target in targets if isinstance(target, ast.Name)}
    found = {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
        for node in ast.walk(function):
            changed = []
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
                changed = [node.func.value]
            elif isinstance(node, ast.Assign | ast.AugAssign | ast.Delete | ast.AnnAssign):
                places = node.targets if isinstance(node, ast.Assign | ast.Delete) else [node.target]
                changed = [place.value for place in places if isinstance(place, ast.Subscript | ast.Attribute)]
            found |= {item.id for item in changed if isinstance(item, ast.Name) and item.id in top}
    return found


def test_state_of_modules_is_that_of_the_process():
    found = {
        f"{path.relative_to(FOLDER)}:{name}" for path in FOLDER.rglob("*.py") for name in state_of(path.read_text())
    }
    known = set().union(*STATE.values())
    assert sum(map(len, STATE.values())) == len(known)
    assert not found - known, f"keep it in an object of the run, of the model or of the call: {sorted(found - known)}"
    assert not known - found, f"no longer there, remove them from this test: {sorted(known - found)}"


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("a = 1\ndef f():\n    global a\n    a = 2", {"a"}),
        ("a = []\ndef f():\n    a.append(1)", {"a"}),
        ("a = {}\ndef f():\n    a['b'] = 1", {"a"}),
        ("a = {}\ndef f():\n    del a['b']", {"a"}),
        ("a = {}\ndef f():\n    a['b'] += 1", {"a"}),
        ("a = C()\ndef f():\n    a.b = 1", {"a"}),
        ("a = {}\na['b'] = 1", set()),
        ("a = []\ndef f():\n    b = []\n    b.append(a)", set()),
    ],
)
def test_what_functions_change_is_noticed(source, names):
    assert state_of(source) == names
