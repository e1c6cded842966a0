"""Ports that no two processes get, and the environment that TensorFlow reads."""

import json
import os
import subprocess
import sys

import pytest
from ray.train import FailureConfig, RunConfig, ScalingConfig

from raytf.collectives import ring_token
from raytf.errors import ConfigError
from raytf.runtime.settings import TensorflowConfig
from raytf.train import arguments, backend
from raytf.train.tensorflow_trainer import TensorflowTrainer

# Reserves a port, prints it, frees it at a line of input as TensorFlow's bind needs, and ends at the next one.
CHILD = """
import ray.util
ray.util.get_node_ip_address = lambda: "127.0.0.1"
from raytf.runtime import ports
from raytf.runtime.settings import Listening
import sys
try:
    print(ports.reserve_address(Listening((int(sys.argv[1]), int(sys.argv[2])))), flush=True)
except Exception as error:
    print(error, flush=True)
input()
ports.release_port()
print("released", flush=True)
input()
"""


@pytest.mark.slow
def test_processes_get_different_ports_even_between_release_and_bind():
    """Of three ports three processes get one each; a fourth gets none, also when TensorFlow has been given theirs."""
    children = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD, "31900", "31902"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    try:
        lines = [child.stdout.readline().strip() for child in children]
        ports = [text for text in lines if text.startswith("127.0.0.1:")]
        assert len(ports) == 3 and len(set(ports)) == 3, lines
        assert sum("A worker needs a free port" in text for text in lines) == 1
        for child in children:
            child.stdin.write("\n")
            child.stdin.flush()
            assert child.stdout.readline().strip() == "released"
        late = subprocess.run(
            [sys.executable, "-c", CHILD, "31900", "31902"], input="\n\n", capture_output=True, text=True
        )
        assert "A worker needs a free port" in late.stdout
    finally:
        for child in children:
            child.communicate("\n\n")


def test_the_environment(monkeypatch):
    for name in ("TF_CONFIG", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "TF_FORCE_GPU_ALLOW_GROWTH"):
        monkeypatch.setenv(name, "before")
    monkeypatch.setattr(ring_token, "_token", None)
    token = ring_token.new_token()
    backend.set_environment(TensorflowConfig(), ["a:1", "b:2"], 1, 3, token)
    assert ring_token.token() == token and token.hex() not in str(os.environ)
    assert json.loads(os.environ["TF_CONFIG"])["task"] == {"type": "worker", "index": 1}
    assert os.environ["TF_NUM_INTRAOP_THREADS"] == "3" and os.environ["TF_NUM_INTEROP_THREADS"] == "3"
    assert os.environ["TF_FORCE_GPU_ALLOW_GROWTH"] == "true"
    backend.set_environment(
        TensorflowConfig(intra_op_threads=2, inter_op_threads=7, memory_growth=False), ["a:1"], 0, 1, bytes(32)
    )
    assert os.environ["TF_NUM_INTRAOP_THREADS"] == "2" and os.environ["TF_NUM_INTEROP_THREADS"] == "7"
    assert os.environ["TF_FORCE_GPU_ALLOW_GROWTH"] == "false"


def test_communication_options():
    from raytf.worker.strategy import communication_options

    options = communication_options(TensorflowConfig(communication="ring", timeout_s=3.5, bytes_per_pack=1 << 20))
    assert options.implementation.value == "RING"
    assert options.timeout_seconds == 3.5 and options.bytes_per_pack == 1 << 20


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        ({"communication": "gloo"}, "communication must be one of auto, ring, nccl; received: 'gloo'"),
        ({"timeout_s": 0}, "timeout_s must be more than 0 seconds"),
        ({"bytes_per_pack": -1}, "bytes_per_pack must be at least 0"),
        ({"ports": (20_000, 70_000)}, r"ports must be the first and the last .* received: \(20000, 70000\)"),
        ({"ports": (30_000, 20_000)}, "ports must be the first and the last"),
        ({"ports": "20000-30000"}, "ports must be the first and the last"),
        ({"network": ""}, "network must be the name of a network interface, .* received: ''"),
        ({"network": "10.1.0.0/160"}, "network must be the name of a network interface"),
        ({"network": "an-interface-of-too-long-a-name"}, "network must be the name of a network interface"),
        ({"network": 5}, "network must be the name of a network interface, .* received: 5"),
        ({"pin_cpus": True}, 'pin_cpus must be "auto" or False; received: True'),
        ({"pin_cpus": 0}, 'pin_cpus must be "auto" or False; received: 0'),
        ({"spares": -1}, "spares must be a number of processes, at least 0; received: -1"),
        ({"spares": True}, "spares must be a number of processes"),
        ({"spares": 1, "heal": False}, "spares replace lost workers in place, which needs heal=True; .*heal=False"),
        ({"spares": 1, "communication": "nccl"}, "spares replace lost workers in place, which needs heal=True"),
        ({"spares": 1, "sync_every": 2}, "spares replace lost workers in place, which needs heal=True"),
        ({"shard_optimizer": 1}, "shard_optimizer must be True or False; received: 1"),
        ({"shard_optimizer": True, "spares": 1}, "nowhere else; received: shard_optimizer=True with spares=1"),
        ({"shard_optimizer": True, "sync_every": 4}, "shard_optimizer=True with sync_every=4"),
        (
            {"shard_optimizer": True, "gradient_dtype": "bfloat16"},
            "shard_optimizer=True with gradient_dtype='bfloat16'",
        ),
        ({"shard_optimizer": True, "sparse_updates": "lazy"}, "shard_optimizer=True with sparse_updates='lazy'"),
        ({"shard_optimizer": True, "communication": "ring"}, "shard_optimizer=True with communication='ring'"),
        ({"shard_optimizer": True, "legacy_keras": True}, "shard_optimizer=True with legacy_keras=True"),
        ({"intra_op_threads": 0}, "intra_op_threads must be an integer of at least 1"),
    ],
)
def test_wrong_options_are_refused(arguments, rule):
    with pytest.raises(ConfigError, match=rule):
        TensorflowConfig(**arguments)


@pytest.mark.parametrize(
    ("scaling", "strategy", "own_loop", "received"),
    [
        ({"num_workers": 2}, "parameter_server", False, "strategy='parameter_server'"),
        ({"num_workers": 2, "use_gpu": True}, "auto", False, "workers with GPUs or TPUs"),
        ({"num_workers": 2}, "auto", True, "a TensorflowTrainer"),
    ],
)
def test_shares_are_refused_where_workers_have_no_ring_or_save_for_themselves(scaling, strategy, own_loop, received):
    config, scaling = TensorflowConfig(shard_optimizer=True), ScalingConfig(**scaling)
    with pytest.raises(ConfigError, match=f"shard_optimizer=True with {received}"):
        arguments.check_sharded(config, strategy, scaling, own_loop)
    arguments.check_sharded(TensorflowConfig(), strategy, scaling, own_loop)
    arguments.check_sharded(config, "auto", ScalingConfig(num_workers=1))


@pytest.mark.parametrize(
    ("scaling", "failures", "strategy", "received"),
    [
        ({"num_workers": 2}, 0, "auto", "spares=1 with no failure allowed"),
        ({"num_workers": 1}, 1, "auto", "spares=1 with num_workers=1"),
        ({"num_workers": 2}, -1, "parameter_server", "spares=1 with strategy='parameter_server'"),
        ({"num_workers": 2, "use_gpu": True}, 3, "auto", "spares=1 with workers with GPUs"),
    ],
)
def test_spares_are_refused_where_none_could_replace_a_worker(scaling, failures, strategy, received):
    scaling, run = ScalingConfig(**scaling), RunConfig(failure_config=FailureConfig(max_failures=failures))
    with pytest.raises(ConfigError, match=received):
        arguments.check_spares(TensorflowConfig(spares=1), scaling, run, strategy)
    arguments.check_spares(TensorflowConfig(), scaling, run, strategy)


def test_spares_of_a_tensorflow_trainer_and_of_enough_workers():
    with pytest.raises(ConfigError, match="those of a TensorflowTrainer all restart; received: spares=1"):
        TensorflowTrainer(
            print, scaling_config=ScalingConfig(num_workers=2), tensorflow_config=TensorflowConfig(spares=1)
        )
    run = RunConfig(failure_config=FailureConfig(max_failures=1))
    arguments.check_spares(TensorflowConfig(spares=2), ScalingConfig(num_workers=(1, 3)), run, "auto")
