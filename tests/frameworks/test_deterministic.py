"""`"deterministic": true`: the same bits in two runs, in processes of their own, and in a run that is resumed."""

import functools
import hashlib
import importlib.util
import json
import textwrap

import deepspeed
import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config

import cuboid
from boosting import boosted, booster_backward
from conftest import TIMEOUT_S
from cuboid import ConfigError
from cuboid.config.schema import parse_config
from cuboid.distributed.determinism import use_deterministic
from cuboid.models.sharded.sharded_model import unwrap
from cuboid.tensor3d.sharding.sharded_param import local_state
from cuboid.verify import SmallModel, WorkerError
from launching import as_ranks
from training import VOCABULARY, make_engine, ranks_of, settings, train

STEPS, SAVED_AFTER = 3, 1
SIZES = {"vocab_size": VOCABULARY, "n_embd": 64, "n_head": 4, "n_layer": 4, "n_positions": 64}


@pytest.fixture(scope="module")
def dropping(tmp_path_factory):
    """A GPT-2 with dropout, for segments without that of attention."""

    @functools.cache
    def written(attention):
        folder = tmp_path_factory.mktemp("gpt2")
        torch.manual_seed(0)
        rates = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": attention}
        config = GPT2Config(**SIZES, **rates, bos_token_id=None, eos_token_id=None)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        return str(folder)

    return written


def bits(model):
    """A checksum of this rank's weights."""
    tensors = [x.detach() for _, x in sorted(local_state(unwrap(model)).items()) if isinstance(x, torch.Tensor)]
    return hashlib.sha256(b"".join(x.contiguous().view(torch.uint8).numpy().tobytes() for x in tensors)).hexdigest()


def engine_run(path, config, folder, first):
    """Losses of an engine's steps from ``first`` on, an early one of which is saved, and the bits of its weights."""
    engine = make_engine(path, config)
    assert torch.are_deterministic_algorithms_enabled()
    engine.train()
    torch.manual_seed(1 + first)
    if first:
        engine.load_checkpoint(folder)
    losses = []
    for step in range(first, STEPS):
        losses += train(engine, 1, skip=step)
        if step + 1 == SAVED_AFTER:
            engine.save_checkpoint(folder)
    return losses, bits(engine)


def booster_run(path, config, folder, first):
    """As :func:`engine_run`, under a Booster, which shards a model that the script has loaded."""
    booster, model, optimizer, schedule = boosted(path, config, torch.float32, in_memory=True)
    assert torch.are_deterministic_algorithms_enabled()
    torch.manual_seed(1 + first)
    if first:
        booster.load_model(model, folder)
        booster.load_optimizer(optimizer, folder)
        booster.load_lr_scheduler(schedule, folder)
    losses = []
    for step in range(first, STEPS):
        losses.append(booster_backward(booster, model, optimizer, step))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step + 1 == SAVED_AFTER:
            booster.save_model(model, folder)
            booster.save_optimizer(optimizer, folder)
            booster.save_lr_scheduler(schedule, folder)
    return losses, bits(model)


def check_runs(pool, run, path, config, ranks, tmp_path):
    """Two runs, and one that goes on from the first one's checkpoint, each in new processes."""
    runs = []
    for folder, first in (("one", 0), ("two", 0), ("one", SAVED_AFTER)):
        with pool.fresh() as processes:
            arguments = (path, config, str(tmp_path / folder), first)
            runs.append(processes.run(ranks, run, *arguments, timeout_s=TIMEOUT_S))
    uninterrupted, again, resumed = runs
    assert again == uninterrupted
    assert resumed == [(losses[SAVED_AFTER:], rank_bits) for losses, rank_bits in uninterrupted]


ZERO_BUBBLE, V = {"schedule": "zero_bubble"}, {"schedule": "zero_bubble-v", "chunks": 2}
INTERLEAVED = {"schedule": "seq1f1b-interleaved", "chunks": 2}
#: The kind of model, replicas and a config.
LAYOUTS = {
    "2x1x1": ("dropping", 1, settings("2x1x1")),
    "1x2x1": ("dropping", 1, settings("1x2x1")),
    "1x1x2": ("llama", 1, settings("1x1x2")),
    "1x1x2, bf16": ("llama", 1, settings("1x1x2", bf16=True)),
    "experts on 1x1x2": ("mixtral", 1, settings("1x1x2")),
    "experts on 1x2x1": ("mixtral", 1, settings("1x2x1")),
    "experts in stages": ("mixtral", 1, settings(stages=2)),
    "2 replicas, ZeRO 0": ("dropping", 2, settings(data=2, zero=0)),
    "2 replicas, ZeRO 1": ("dropping", 2, settings(data=2, zero=1)),
    "2 replicas of 2 stages, bf16": ("dropping", 2, settings(stages=2, data=2, bf16=True)),
    "stages": ("dropping", 1, settings(stages=2)),
    "stages, zero_bubble": ("dropping", 1, settings(stages=2, pipeline=ZERO_BUBBLE)),
    "stages, zero_bubble-v": ("dropping", 1, settings(stages=2, pipeline=V)),
    "stages, interleaved": ("dropping", 1, settings(stages=2, pipeline=INTERLEAVED)),
    "stages of 1x2x1": ("dropping", 1, settings("1x2x1", 2)),
    "stages of 1x1x2, zero_bubble": ("llama", 1, settings("1x1x2", 2, pipeline=ZERO_BUBBLE)),
}


@pytest.mark.sample(1, ci=1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bits_are_the_same_in_each_run(pool, dropping, checkpoint, tmp_path, layout):
    kind, replicas, config = LAYOUTS[layout]
    is_staged = "pipeline" in config
    path = dropping(0.0 if is_staged else 0.1) if kind == "dropping" else checkpoint(SmallModel(kind))
    config = {**config, "deterministic": True}
    check_runs(pool, engine_run, path, config, ranks_of(config, replicas), tmp_path)


@pytest.mark.skipif(importlib.util.find_spec("colossalai") is None, reason="ColossalAI isn't installed")
@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=pytest.mark.slow) for name in ("stages, zero_bubble", "1x2x1", "stages")]
)
def test_bits_are_the_same_under_a_booster(pool, dropping, tmp_path, layout):
    _, _, config = LAYOUTS[layout]
    sections = ("tensor_parallel", "pipeline", "gradient_accumulation_steps", "zero_optimization")
    config = {name: config[name] for name in sections if name in config}
    config |= {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.5, "deterministic": True}
    check_runs(pool, booster_run, dropping(0.0), config, ranks_of(config), tmp_path)


TRAINER = """
    import json, sys
    import torch
    import cuboid
    from torch.utils.data import Dataset
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, logging

    logging.set_verbosity_error()
    path, out, config, resume = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), json.loads(sys.argv[4])

    class Tokens(Dataset):
        def __len__(self):
            return 32
        def __getitem__(self, row):
            ids = torch.randint(0, 131, (12,), generator=torch.Generator().manual_seed(row))
            return {"input_ids": ids, "labels": ids}

    arguments = TrainingArguments(
        out, deepspeed=config, use_cpu=True, report_to=[], disable_tqdm=True, seed=5, save_strategy="steps",
        save_steps=2, max_steps=4, per_device_train_batch_size=4, gradient_accumulation_steps=2, logging_steps=1,
        learning_rate=1e-2, max_grad_norm=0.5,
    )
    trainer = (cuboid.CuboidTrainer if "pipeline" in config else Trainer)(
        model=AutoModelForCausalLM.from_pretrained(path), args=arguments, train_dataset=Tokens()
    )
    trainer.train(resume_from_checkpoint=resume)
    assert torch.are_deterministic_algorithms_enabled()
    trainer.save_model(out)
    names = ("loss", "grad_norm", "learning_rate", "step")
    logged = [[entry[name] for name in names] for entry in trainer.state.log_history if "loss" in entry]
    print("RESULT" + json.dumps(logged))
    # A rank that leaves first would take the others' connections along.
    torch.distributed.destroy_process_group()
"""


@pytest.mark.ci
@pytest.mark.parametrize(
    "layout",
    ["stages, zero_bubble", *(pytest.param(name, marks=pytest.mark.slow) for name in ("1x2x1", "stages of 1x2x1"))],
)
def test_bits_are_the_same_under_a_trainer(dropping, tmp_path, layout):
    _, _, config = LAYOUTS[layout]
    config = {**config, "train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto", "deterministic": True}
    # The Trainer's own optimizer and schedule.
    del config["optimizer"], config["scheduler"]
    (tmp_path / "script.py").write_text(textwrap.dedent(TRAINER))

    def run(name, resume=None):
        arguments = (dropping(0.0), tmp_path / name, json.dumps(config), json.dumps(resume))
        replies = as_ranks(ranks_of(config), tmp_path / "script.py", *arguments)
        assert all(status == 0 for status, _ in replies), "\n".join(output for _, output in replies)
        logged = [json.loads(output.partition("RESULT")[2].splitlines()[0]) for _, output in replies]
        weights = [path.read_bytes() for path in sorted((tmp_path / name).glob("*.safetensors"))]
        assert weights
        return logged, weights

    logged, weights = run("one")
    assert [entry[-1] for entry in logged[0]] == [1, 2, 3, 4]
    assert run("two") == (logged, weights)
    # The log of the steps before is in the checkpoint.
    assert run("resumed", str(tmp_path / "one" / "checkpoint-2")) == (logged, weights)


def _put(*_):
    torch.zeros(4).put_(torch.tensor([1, 1]), torch.tensor([1.0, 2.0]))


def through(door, path, config):
    """What torch says of a kernel that writes in any order, after a config has come in through a door."""
    if door == "from_pretrained":
        cuboid.from_pretrained(path, config)
    elif door == "scope":
        with cuboid.scope(config):
            pass
    elif door == "shard":
        cuboid.shard(AutoModelForCausalLM.from_pretrained(path), config)
    else:
        model = AutoModelForCausalLM.from_pretrained(path)
        deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)
    with pytest.raises(RuntimeError) as caught:
        _put()
    return str(caught.value)


@pytest.mark.parametrize("door", ["from_pretrained", "scope", "shard", "initialize"])
def test_a_kernel_without_a_fixed_order_is_named_through_every_door(alone, checkpoint, door):
    config = {**settings(), "deterministic": True}
    del config["optimizer"], config["scheduler"]
    (message,) = alone.run(1, through, door, checkpoint(SmallModel("llama")), config, timeout_s=TIMEOUT_S)
    assert "put_ does not have a deterministic implementation" in message


def step_with_put(path, config):
    """The last stage has a hook with such a kernel."""
    engine = make_engine(path, config)
    model = unwrap(engine)
    if cuboid.mesh_of(engine).has_last_stage:
        model.get_submodule("lm_head").register_forward_pre_hook(cuboid.local_hook(_put))
    train(engine, 1)


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize("stages", [None, 2], ids=["a mesh", "stages"])
def test_all_ranks_end_with_the_name_of_such_a_kernel(pool, checkpoint, stages):
    config = {**settings("1x2x1", stages), "deterministic": True}
    with pool.fresh() as processes, pytest.raises(WorkerError) as caught:
        processes.run(ranks_of(config), step_with_put, checkpoint(SmallModel("llama")), config, timeout_s=TIMEOUT_S)
    assert "put_ does not have a deterministic implementation" in str(caught.value)
    assert "ran out of time" not in str(caught.value)


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


def test_nccl_is_named_where_its_group_was_made_before(gpus):
    gpus.setattr(torch.distributed, "is_initialized", lambda: True)
    gpus.setattr(torch.distributed, "get_backend", lambda: "cpu:gloo,cuda:nccl")
    environment = {}
    with pytest.raises(ConfigError, match="the process group was made already; start the job with NCCL_ALGO=\\^NVLS"):
        use_deterministic(environment)
    use_deterministic({"NCCL_ALGO": "^NVLS"})
