"""Imports go down only: a module may import modules of its own floor or of floors below, at the top of the file."""

import ast
import pathlib

import raytf

FLOORS = [
    {"allocator", "errors", "folders", "plain_values", "quiet", "reads", "scaled_float16", "stored_json", "watch"},
    {
        "callback_state",
        "checkpoint_files",
        "columns",
        "identity",
        "legacy_keras",
        "lock_file",
        "ring",
        "scratch",
        "settings",
        "topology",
        "trusted",
        "validation",
    },
    {"order", "rates", "roles"},
    {
        "answers",
        "autograph_files",
        "chief_callbacks",
        "collectives",
        "connection",
        "contents",
        "double_writes",
        "failures",
        "fit_tf_data",
        "guard",
        "hyperband",
        "keras_import",
        "launch_spec",
        "legacy_names",
        "meaning",
        "once",
        "optimizers",
        "options",
        "output",
        "pieces",
        "ports",
        "progress",
        "quiet_import",
        "remote_model",
        "report",
        "resources",
        "run_lock",
        "sources",
        "summary",
        "tpu",
        "transport",
        "waiting",
    },
    {
        "backend",
        "blocks",
        "checkpoint",
        "gradient_ring",
        "multiworker_callbacks",
        "multiworker_step",
        "processes",
        "ray_config",
        "reservation",
        "run_folder",
        "script",
        "session",
        "space",
        "tensors",
        "watchdog",
        "worker_part",
    },
    {
        "callbacks",
        "fingerprint",
        "fit_data",
        "lane",
        "legacy_callbacks",
        "local",
        "multiworker_averaging",
        "multiworker_input",
        "multiworker_losses",
        "servers",
        "streams",
        "tasks",
        "trial_train",
        "worker",
    },
    {
        "checks",
        "evaluator",
        "execution",
        "fit_worker",
        "inspection",
        "launching",
        "multiworker_gradients",
        "multiworker_metrics",
        "readers",
        "run",
        "storage",
        "trial",
        "verbosity",
    },
    {"keras_multiworker", "planning", "sweep_table", "trainer", "warm"},
    {"strategy", "sweeping"},
    {"feed"},
    {"fit_call", "worker_rows"},
    {"__init__", "cli", "fitting", "parameter_server"},
]
FOLDER = pathlib.Path(raytf.__file__).parent
DRIVER = (
    "__init__",
    "cli",
    "trainer",
    "inspection",
    "worker",
    "blocks",
    "launching",
    "local",
    "ray_config",
    "trial_train",
    "processes",
    "pieces",
    "storage",
    "streams",
    "backend",
    "failures",
    "columns",
    "sources",
    "checkpoint",
    "session",
    "lane",
    "trial",
    "sweeping",
    "sweep_table",
    "space",
    "hyperband",
    "rates",
    "reads",
    "report",
    "ring",
    "roles",
    "script",
    "tasks",
    "run",
    "servers",
    "checks",
    "planning",
    "evaluator",
    "options",
    "launch_spec",
    "legacy_keras",
    "connection",
    "validation",
    "fit_worker",
    "warm",
)


def imported(name, nested):
    """Modules of raytf, or names of other packages, that a module imports: at its top, or anywhere."""
    tree = ast.parse((FOLDER / f"{name}.py").read_text())
    nodes = ast.walk(tree) if nested else tree.body
    found = set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            if node.module == "raytf":
                found |= {f"raytf.{alias.name}" for alias in node.names}
            else:
                found.add(node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def floor_of(name):
    return next(i for i, names in enumerate(FLOORS) if name in names)


def test_every_module_has_a_floor():
    assert {path.stem for path in FOLDER.glob("*.py")} == set().union(*FLOORS)


def test_imports_only_go_down():
    for name in set().union(*FLOORS) - {"__init__"}:
        for module in imported(name, nested=False):
            if module.startswith("raytf."):
                target = module.split(".")[1]
                assert floor_of(target) < floor_of(name) or (target == name), f"{name} imports {target} from above"


def test_the_ground_is_standard_library_and_numpy():
    import sys

    for name in set().union(*FLOORS[:3]):
        others = {m.split(".")[0] for m in imported(name, nested=True)} - {"raytf", "numpy"}
        assert others <= sys.stdlib_module_names, (name, others)


def test_driver_modules_import_no_tensorflow_at_the_top():
    for name in DRIVER:
        packages = {m.split(".")[0] for m in imported(name, nested=False)}
        assert not packages & {"tensorflow", "keras"}, name
