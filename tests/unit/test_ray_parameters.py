"""The page of Ray compatibility has a row for all that Ray takes in public, and what it lists as refused is refused."""

from __future__ import annotations

import inspect
import pathlib
import re

import pytest
import ray.train
import ray.train.collective
import ray.train.tensorflow
from ray.train import Checkpoint, CheckpointUploadMode, DataConfig, ScalingConfig, ValidationConfig
from ray.train.v2._internal.execution.context import TrainRunContext

import raytf
from raytf.runtime import reservation
from raytf.train import arguments, local, ray_config
from raytf.train.session_functions import TrialContext, TrialSetup, TrialTrainFnUtils, preemption, ranks_of_worker
from raytf.worker.trial_session import TrialSession

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "reference" / "ray-compatibility.md"
COLUMNS = ("TensorflowTrainer", "KerasTrainer", "sweep", "num_workers=0")
CLASSES = [
    *(ray.train.ScalingConfig, ray.train.RunConfig, ray.train.FailureConfig, ray.train.CheckpointConfig),
    *(ray.train.LoggingConfig, DataConfig, ValidationConfig, ray.train.ValidationTaskConfig),
    *(ray.train.tensorflow.TensorflowTrainer, ray.train.tensorflow.TensorflowConfig, ray.train.report),
]


def rows():
    """Returns the text of each column, by the name of the row."""
    found = {}
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| `"):
            name = cells[0].strip("`| ")
            assert name not in found, f"two rows for {name}"
            found[name] = dict(zip(COLUMNS, cells[1:5], strict=True))
    return found


def offered():
    """What Ray offers, by the names that rows have."""
    names = {f"{one.__name__}({parameter})" for one in CLASSES for parameter in inspect.signature(one).parameters}
    names |= {f"ray.train.{name}" for name in ray.train.__all__}
    names |= {f"ray.train.collective.{name}" for name in ray.train.collective.__all__}
    names |= {f"get_context().{name}" for name in dir(ray.train.TrainContext) if not name.startswith("_")}
    return names | {f"UserCallback.{name}" for name in dir(ray.train.UserCallback) if not name.startswith("_")}


def test_each_thing_that_ray_offers_has_a_row():
    assert not offered() - rows().keys(), "Ray offers what has no row"
    assert rows().keys() - offered() == {"RAY_TRAIN_CALLBACKS"}, "rows for what Ray does not offer"
    assert {cell for row in rows().values() for cell in row.values()} == {"works", "refused", "Ray refuses", "–"}


def test_the_trainers_take_what_rays_takes():
    taken = set(inspect.signature(raytf.TensorflowTrainer).parameters)
    assert set(inspect.signature(ray.train.tensorflow.TensorflowTrainer).parameters) <= taken
    keras = {
        name for name, row in rows().items() if name.startswith("TensorflowTrainer(") and row["KerasTrainer"] != "–"
    }
    taken = set(inspect.signature(raytf.KerasTrainer).parameters)
    assert {re.search(r"\((.*)\)", name)[1] for name in keras} <= taken


def loop(config):
    pass


def validate(checkpoint):
    return {}


def trainer(workers=1, scaling=None, validation=None, **run):
    scaling = ScalingConfig(num_workers=workers, **(scaling or {}))
    run_config = ray.train.RunConfig(**run)
    return raytf.TensorflowTrainer(loop, scaling_config=scaling, run_config=run_config, validation_config=validation)


def sweep(space=None, **given):
    raytf.sweep(trainer(**given), space or {"rate": 0.1})


def fails(**given):
    return {"failure_config": ray.train.FailureConfig(**given)}


def trial(folder, **given):
    """The functions that Ray Train has, in a trial that stops at no report."""
    session = TrialSession(0, 1, None, "trial")
    session.commands.put("go")
    return TrialTrainFnUtils(session, TrialSetup(nodes=("a",)), lambda value: value, str(folder))


def reports(folder, **given):
    trial(folder / "trial").report({"loss": 1.0}, **given)


def run_locally(folder, function, **run):
    """Runs a loop in this process, as a run of a folder."""
    made = trainer(workers=0, storage_path=str(folder), name="here", **run)
    return local.run(function, made.train_run_context, {}, lambda: False)


class Callback(ray.train.UserCallback):
    pass


CHECKS = ValidationConfig(validate)
ENVIRONMENT = {"RAY_TRAIN_CALLBACKS": "some.module.Callback"}
VALIDATION = ("ValidationConfig(fn)", "ValidationConfig(task_config)", "ValidationConfig(ray_remote_kwargs)")
VALIDATION += ("ValidationTaskConfig(fn_kwargs)", "ValidationTaskConfig(timeout_s)")
VALIDATION += ("TensorflowTrainer(validation_config)",)
VALIDATION += tuple(f"ray.train.{name}" for name in ("ValidationConfig", "ValidationFn", "ValidationTaskConfig"))
CALLBACKS = (
    "UserCallback.after_report",
    "UserCallback.after_exception",
    "RunConfig(callbacks)",
    "ray.train.UserCallback",
)
LISTED = [f"ray.train.{name}" for name in ("get_all_reported_checkpoints", "CheckpointConsistencyMode")]
LISTED += [f"ray.train.{name}" for name in ("ReportedCheckpoint", "ReportedCheckpointStatus")]
# (row, column): (what is done in a folder, what the error names)
REFUSED = {
    ("ScalingConfig(use_tpu)", "num_workers=0"): (lambda f: trainer(0, {"use_tpu": True}), "use_tpu=True"),
    ("ScalingConfig(topology)", "sweep"): (
        lambda f: sweep(scaling={"use_tpu": True, "topology": "2x2x1", "accelerator_type": "TPU-V4"}),
        "topology='2x2x1'",
    ),
    ("FailureConfig(controller_failure_limit)", "sweep"): (
        lambda f: sweep(**fails(controller_failure_limit=3)),
        "controller_failure_limit=3",
    ),
    ("FailureConfig(max_preemption_failures)", "sweep"): (
        lambda f: sweep(**fails(max_preemption_failures=2)),
        "max_preemption_failures=2",
    ),
    ("FailureConfig(relax_collectives_on_preemption)", "sweep"): (
        lambda f: sweep(**fails(relax_collectives_on_preemption=True)),
        "relax_collectives_on_preemption=True",
    ),
    ("FailureConfig(preemption_grace_s)", "sweep"): (
        lambda f: sweep(**fails(preemption_grace_s=5.0)),
        "preemption_grace_s=5.0",
    ),
    ("DataConfig(datasets_to_split)", "KerasTrainer"): (
        lambda f: ray_config.apply_data_config(
            {"train": None, "validation": None}, DataConfig(datasets_to_split=["train"])
        ),
        r"datasets_to_split=\['train'\]",
    ),
    ("RAY_TRAIN_CALLBACKS", "sweep"): (lambda f: sweep(), "RAY_TRAIN_CALLBACKS=some.module.Callback"),
    ("RAY_TRAIN_CALLBACKS", "num_workers=0"): (
        lambda f: run_locally(f, print),
        "RAY_TRAIN_CALLBACKS=some.module.Callback",
    ),
    ("report(checkpoint_dir_name)", "sweep"): (lambda f: reports(f, checkpoint_dir_name="a"), "dir_name='a'"),
    ("report(checkpoint_upload_mode)", "sweep"): (
        lambda f: reports(f, checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD),
        "NO_UPLOAD",
    ),
    ("report(checkpoint_upload_fn)", "sweep"): (lambda f: reports(f, checkpoint_upload_fn=print), "upload_fn"),
    ("report(validation)", "sweep"): (lambda f: reports(f, validation=True), r"report\(validation=...\)"),
    ("report(validation)", "num_workers=0"): (
        lambda f: run_locally(f, lambda: ray.train.report({}, Checkpoint(str(f)), validation=True)),
        r"report\(validation=...\)",
    ),
}
REFUSED |= {(row, "sweep"): (lambda f: sweep(validation=CHECKS), "validation_config") for row in VALIDATION}
REFUSED |= {
    (row, "num_workers=0"): (lambda f: trainer(0, validation=CHECKS), "validation_config") for row in VALIDATION
}
REFUSED |= {
    ("RAY_TRAIN_CALLBACKS", kind): (lambda f: trainer(), "RAY_TRAIN_CALLBACKS=some.module.Callback")
    for kind in ("TensorflowTrainer", "KerasTrainer")
}
REFUSED |= {(row, "sweep"): (lambda f: sweep(callbacks=[Callback()]), r"callbacks=\[Callback\]") for row in CALLBACKS}
REFUSED |= {
    (row, "sweep"): (lambda f: trial(f).get_all_reported_checkpoints(), "get_all_reported_checkpoints")
    for row in LISTED
}


def test_what_is_refused_has_a_case():
    refused = {(name, column) for name, row in rows().items() for column, cell in row.items() if cell == "refused"}
    assert refused == REFUSED.keys()


@pytest.mark.parametrize("case", REFUSED, ids="-".join)
def test_refused_with_an_alternative(case, tmp_path, monkeypatch):
    if case[0] in ENVIRONMENT:
        monkeypatch.setenv(case[0], ENVIRONMENT[case[0]])
    action, named = REFUSED[case]
    started = ray.is_initialized()  # by tests before
    with pytest.raises(raytf.ConfigError, match=named) as caught:
        action(tmp_path)
    assert caught.value.fix and len(str(caught.value).splitlines()) == 1
    assert ray.is_initialized() == started, "it was refused after something had started"


def test_what_depends_on_more_is_refused_too(tmp_path):
    class Own(DataConfig):
        pass

    cases = (
        (lambda: sweep(workers=(1, 2)), r"num_workers=\(1, 2\)"),
        (
            lambda: sweep({"num_workers": 2}, workers=2, scaling={"label_selector": [{"a": "b"}] * 2}),
            "list as ScalingConfig",
        ),
        (
            lambda: arguments.check_servers(
                "parameter_server", 1, ScalingConfig(num_workers=1, label_selector=[{"a": "b"}])
            ),
            "one label selector for all",
        ),
        (lambda: ray_config.apply_data_config({}, Own()), "a Own, which may cut"),
        (lambda: ray_config.check_validation(CHECKS, True), "both"),
        (lambda: ray_config.check_validation(3, False), "received: 3"),
        (
            lambda: raytf.TensorflowTrainer(
                loop,
                scaling_config=ScalingConfig(num_workers=0),
                tensorflow_config=raytf.TensorflowConfig(inter_op_threads=2),
            ),
            "inter_op_threads=2.*set_inter_op_parallelism_threads",
        ),
        (
            lambda: ray_config.check_local(
                ScalingConfig(num_workers=0), None, raytf.TensorflowConfig(legacy_keras=True), 0, None
            ),
            "legacy_keras=True.*TF_USE_LEGACY_KERAS=1 before Python starts",
        ),
        (lambda: trainer(workers=(0, 2)), "num_workers must be at least 1"),
        (
            lambda: run_locally(tmp_path, print, callbacks=[ray.train.v2.api.callback.RayTrainCallback()]),
            "RayTrainCallback",
        ),
        (lambda: run_locally(tmp_path, lambda: report_elsewhere(tmp_path)), "must be in the run's folder"),
    )
    for action, named in cases:
        with pytest.raises(raytf.ConfigError, match=named):
            action()


def test_tasks_next_to_workers_are_placed_with_them():
    zone, other = {"zone": "a"}, {"zone": "b"}
    scaling = ScalingConfig(num_workers=2, placement_strategy="SPREAD", label_selector=zone)
    coordinator, _ = arguments.servers(1, scaling, {})
    assert coordinator.label_selector == zone and coordinator.placement_strategy == "SPREAD"
    assert reservation.bundle_selectors([zone, zone], 3) == [zone] * 3
    assert (
        reservation.bundle_selectors([zone, other], 3) == [zone, other, {}]
        and reservation.bundle_selectors(None, 3) is None
    )


def report_elsewhere(folder):
    ray.train.report({}, Checkpoint(str(folder)), checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD)


def rays(cell_name):
    """The class and the parameter of a row, or the method of a context."""
    kind, parameter = re.fullmatch(r"(\w+)\((\w+)\)", cell_name).groups()
    return next(one for one in CLASSES if one.__name__ == kind), parameter


@pytest.mark.parametrize("name", [name for name, row in rows().items() if "Ray refuses" in row.values()])
def test_what_ray_refuses(name, tmp_path):
    """By Ray itself, or as Ray does it."""
    if name == "ray.train.SyncConfig":
        name = "RunConfig(sync_config)"
    if name.startswith("get_context()."):
        contexts = [trial(tmp_path).get_context(), TrialContext("here", 0, TrialSetup(nodes=("a",)))]
        for context in contexts:
            with pytest.raises(DeprecationWarning):
                getattr(context, name.partition(".")[2])()
        return
    kind, parameter = rays(name)
    with pytest.raises(DeprecationWarning):
        if kind is ray.train.tensorflow.TensorflowTrainer:
            raytf.TensorflowTrainer(loop, **{parameter: {"a": "b"}})
        else:
            kind(**{parameter: {"CPU": 1}})


def test_local_and_node_ranks_of_a_trials_workers():
    """As Ray Train counts: nodes in the order of their first ranks."""
    nodes = ("b", "a", "b", "c", "a")
    places = [ranks_of_worker(rank, nodes) for rank in range(5)]
    assert [p["local_rank"] for p in places] == [0, 0, 1, 0, 1]
    assert [p["node_rank"] for p in places] == [0, 1, 0, 2, 1]
    assert [p["local_world_size"] for p in places] == [2, 2, 2, 1, 2]
    assert preemption(nodes, {}) is preemption(nodes, {"elsewhere": 5}) is None
    found = preemption(nodes, {"a": 0, "b": 7000, "elsewhere": 1})
    assert found.deadline_ms == 7000 and found.preempted_ranks == [0, 1, 2, 4]
    assert preemption(nodes, {"c": 0}).deadline_ms is None


def test_a_trials_context_and_report(tmp_path):
    filesystem, folder = ray.train.v2._internal.execution.storage.get_fs_and_path(str(tmp_path / "sweep" / "trial_1"))
    session = TrialSession(1, 2, None, "trial_1")
    trial_setup = TrialSetup(nodes=("a", "a"), filesystem=filesystem, folder=folder)
    functions = TrialTrainFnUtils(session, trial_setup, lambda value: value, str(tmp_path / "scratch"))
    assert functions.get_context().get_storage().experiment_fs_path == folder
    with pytest.raises(KeyError, match=r"one that the trainer was given \(none\); received: 'train'"):
        functions.get_dataset_shard(ray.train.v2._internal.data_integration.interfaces.DatasetShardMetadata("train", 1))
    uploaded = tmp_path / "mine"
    uploaded.mkdir()
    (uploaded / "rank_1").write_text("1")
    session.commands.put("save")
    session.commands.put("go")
    functions.report({"loss": 1.0}, Checkpoint(str(uploaded)), delete_local_checkpoint_after_upload=True)
    assert session.events.get() == ("report", {"loss": 1.0})
    assert session.events.get() == ("saved", {"rank_1": b"1"}), "each worker's files belong to the checkpoint"
    assert not uploaded.exists()


def test_a_run_in_this_process_is_kept_as_one_with_workers(tmp_path, caplog):
    called = []

    class Tells(ray.train.UserCallback):
        def after_report(self, run_context, metrics, checkpoint):
            called.append((run_context.run_config.name, metrics, checkpoint and pathlib.Path(checkpoint.path).name))

        def after_exception(self, run_context, worker_exceptions):
            called.append(worker_exceptions)

    def train():
        before = ray.train.get_checkpoint()
        context = ray.train.get_context()
        assert (context.get_world_size(), context.get_world_rank(), context.get_node_rank()) == (1, 0, 0)
        for epoch in range(3):
            folder = tmp_path / f"local_{epoch}"
            folder.mkdir(exist_ok=True)
            (folder / "epoch").write_text(str(epoch))
            mode = CheckpointUploadMode.ASYNC if epoch == 1 else CheckpointUploadMode.SYNC
            name = f"epoch_{epoch}" if before is None else f"again_{epoch}"
            ray.train.report(
                {"epoch": epoch}, Checkpoint(str(folder)), checkpoint_dir_name=name, checkpoint_upload_mode=mode
            )
            assert folder.exists() == (epoch != 1), "ASYNC deletes the local files"
        assert ray.train.get_preemption_info() is None
        ray.train.collective.barrier()
        kept = [pathlib.Path(one.checkpoint.path).name for one in ray.train.get_all_reported_checkpoints()]
        return before and pathlib.Path(before.path).name, kept

    keep = {"callbacks": [Tells()], "checkpoint_config": ray.train.CheckpointConfig(num_to_keep=2)}
    with caplog.at_level("INFO"):
        result = run_locally(tmp_path, train, **keep)
    assert not [one for one in caplog.records if "Checkpoint" in one.getMessage()], "Ray Train's levels hold here, too"
    assert result.return_value == (None, ["epoch_1", "epoch_2"]) and result.metrics == {"epoch": 2}
    assert called[0] == ("here", [{"epoch": 0}], "epoch_0") and len(called) == 3
    assert ray.train.Result.from_path(result.path).checkpoint.path == result.checkpoint.path
    assert run_locally(tmp_path, train, **keep).return_value[0] == "epoch_2", "the run goes on"
    called.clear()
    with pytest.raises(ZeroDivisionError):
        run_locally(tmp_path, lambda: 1 / 0, **keep)
    assert isinstance(called[0][0], ZeroDivisionError)
    with pytest.raises(RuntimeError, match="cannot be used outside"):
        ray.train.get_context()


def test_what_the_dashboard_gets():
    from ray.train.v2._internal.util import TrainingFramework

    made = trainer()
    assert made.backend_config.framework is TrainingFramework.TENSORFLOW
    assert isinstance(made.train_run_context, TrainRunContext)


def test_fit_takes_of_rays_configs_what_it_can(tmp_path):
    from raytf.fitting import calls

    unnamed = ray.train.RunConfig()
    unnamed.name = "ray_train_run-2000-01-01_00-00-00"  # one that was made a while ago
    assert calls._workers(None, ScalingConfig(num_workers=2), unnamed)[0].num_workers == 2
    refused = {
        "name": "mine",
        "storage_path": str(tmp_path),
        "storage_filesystem": ray.train.v2._internal.execution.storage.get_fs_and_path(str(tmp_path))[0],
        "failure_config": ray.train.FailureConfig(max_failures=1),
        "checkpoint_config": ray.train.CheckpointConfig(num_to_keep=1),
        "callbacks": [Callback()],
    }
    for name, value in refused.items():
        with pytest.raises(raytf.ConfigError, match=rf"RunConfig\({name}="):
            calls._workers(2, None, ray.train.RunConfig(**{name: value}))
    for scaling in (ScalingConfig(num_workers=0), ScalingConfig(num_workers=(1, 2)), ScalingConfig(use_tpu=True)):
        with pytest.raises(raytf.ConfigError):
            calls._workers(None, scaling, None)
