"""`"deterministic": true`: the same bits in two runs, in processes of their own, and in a run that is resumed."""

import hashlib

import pytest
import torch
from transformers import AutoModelForCausalLM

import cuboid
from conftest import TIMEOUT_S
from cuboid import ConfigError
from cuboid.config.schema import parse_config
from cuboid.distributed.determinism import use_deterministic
from cuboid.tensor3d.sharding.sharded_param import local_state
from cuboid.verify import SmallModel
from training import make_engine, ranks_of, settings, small_checkpoint, train

STEPS = 3
ZERO_BUBBLE = {"schedule": "zero_bubble"}


def bits(engine):
    """A checksum of this rank's weights."""
    state = local_state(cuboid.models.sharded.sharded_model.unwrap(engine))
    tensors = [x.detach() for name, x in sorted(state.items()) if isinstance(x, torch.Tensor)]
    return hashlib.sha256(b"".join(x.contiguous().view(torch.uint8).numpy().tobytes() for x in tensors)).hexdigest()


def whole_run(path, config, folder):
    """Save in the middle; the weights' bits at the end."""
    engine = make_engine(path, config)
    assert torch.are_deterministic_algorithms_enabled()
    engine.train()
    torch.manual_seed(1)
    losses = train(engine, 1)
    engine.save_checkpoint(folder, tag="middle")
    return losses + train(engine, STEPS - 1, skip=1), bits(engine)


def resumed_run(path, config, folder):
    engine = make_engine(path, config)
    engine.train()
    torch.manual_seed(2)
    engine.load_checkpoint(folder, tag="middle")
    return train(engine, STEPS - 1, skip=1), bits(engine)


def config_of(mesh, stages, pipeline):
    return {**settings(mesh, stages, pipeline=pipeline), "deterministic": True}


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("architecture", "mesh", "stages", "pipeline"),
    [
        ("gpt2", "2x1x1", None, {}),
        ("mixtral", "1x1x2", None, {}),
        ("gpt2", "1x2x1", None, {}),
        ("gpt2", "1x1x1", 2, {}),
        ("llama", "1x1x2", None, {}),
        ("mixtral", "1x2x1", None, {}),
        ("gpt2", "1x1x1", 2, ZERO_BUBBLE),
    ],
)
def test_bits_are_the_same_in_each_run(pool, tmp_path, architecture, mesh, stages, pipeline):
    # With dropout, where there is any.
    path = str(tmp_path / "model")
    if architecture == "mixtral":
        SmallModel("mixtral", router_loss=0.0).write(path)
    else:
        path = small_checkpoint(AutoModelForCausalLM, architecture, path)
    config = config_of(mesh, stages, pipeline)
    runs = []
    for number in range(2):
        with pool.fresh() as ranks:
            arguments = (path, config, str(tmp_path / f"run{number}"))
            runs.append(ranks.run(ranks_of(config), whole_run, *arguments, timeout_s=TIMEOUT_S))
    assert runs[0] == runs[1]
    with pool.fresh() as ranks:
        resumed = ranks.run(ranks_of(config), resumed_run, path, config, str(tmp_path / "run0"), timeout_s=TIMEOUT_S)
    assert [own for _, own in resumed] == [own for _, own in runs[0]]
    assert [losses for losses, _ in resumed] == [losses[1:] for losses, _ in runs[0]]


def forward_with_put(path, config):
    """What torch says of a kernel that adds in any order, on a model loaded by whichever door."""
    model = cuboid.from_pretrained(path, config)
    hidden = torch.zeros(4)
    try:
        hidden.put_(torch.tensor([1, 1]), torch.tensor([1.0, 2.0]))
    except RuntimeError as error:
        return str(error), model.training
    return "", model.training


def test_a_kernel_without_a_fixed_order_is_named(alone, checkpoint):
    path = checkpoint(SmallModel("llama"))
    config = {"tensor_parallel": {"mode": "3d_tensor", "mesh": {}}, "deterministic": True}
    ((message, _),) = alone.run(1, forward_with_put, path, config, timeout_s=TIMEOUT_S)
    assert "put_" in message
    assert "deterministic" in message


def test_cuts_by_measured_times_are_refused():
    pipeline = {"engine": "seq1f1b", "stages": 2, "segments": 2, "partition": "measured"}
    with pytest.raises(ConfigError, match=r'partition is "measured".*"deterministic": true'):
        parse_config({"pipeline": pipeline, "deterministic": True})


@pytest.fixture
def gpus(monkeypatch):
    """As if there were GPUs; torch's settings are restored afterwards."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda _: None)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    return monkeypatch


def test_variables_of_cuda_are_set_or_named(gpus):
    environment = {}
    use_deterministic(environment)
    assert environment["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert environment["NCCL_ALGO"] == "^NVLS"
    assert environment["FLASH_ATTENTION_DETERMINISTIC"] == "1"
    use_deterministic({"CUBLAS_WORKSPACE_CONFIG": ":16:8", "NCCL_ALGO": "Ring"})
    with pytest.raises(ConfigError, match="CUBLAS_WORKSPACE_CONFIG is ':0:0'"):
        use_deterministic({"CUBLAS_WORKSPACE_CONFIG": ":0:0"})
    with pytest.raises(ConfigError, match="NCCL_ALGO is 'NVLS'"):
        use_deterministic({"NCCL_ALGO": "NVLS"})
    gpus.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(ConfigError, match="CUDA is in use already; start the job with CUBLAS_WORKSPACE_CONFIG=:4096:8"):
        use_deterministic({})
