"""Validation of configs: keys, types, misspelt keys, and the framework's settings beside them."""

import base64
import json
from types import SimpleNamespace

import pytest
import torch

from cuboid.config.compatibility import check_framework_config
from cuboid.config.config_file import load_config
from cuboid.config.schema import own_config, parse_config, split_config
from cuboid.errors import ConfigError, MeshError

SECTION = {"mode": "3d_tensor", "mesh": {"batch": 2, "sequence": 2, "hidden": 2}}


def deepspeed_config(**keys):
    return {"tensor_parallel": SECTION, "train_micro_batch_size_per_gpu": 4, **keys}


def test_own_keys_are_removed_and_the_rest_is_unchanged():
    source = deepspeed_config(zero_optimization={"stage": 1})
    config, rest = split_config(source)
    assert str(config.tensor_parallel.mesh.shape) == "2×2×2"
    assert rest == {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1}}
    assert source["tensor_parallel"] is SECTION


@pytest.mark.parametrize("suffix", ["json", "yaml", "yml"])
def test_json_and_yaml_give_the_same_config(tmp_path, suffix):
    path = tmp_path / f"config.{suffix}"
    yaml_text = "tensor_parallel: {mode: 3d_tensor, mesh: {batch: 2, sequence: 2, hidden: 2}}\nbf16: {enabled: true}\n"
    json_text = json.dumps({"tensor_parallel": SECTION, "bf16": {"enabled": True}})
    path.write_text(json_text if suffix == "json" else yaml_text)
    config, rest = split_config(path)
    assert config.tensor_parallel.mesh_size == 8
    assert rest == {"bf16": {"enabled": True}}


def test_a_config_without_our_keys_is_left_to_the_framework():
    source = {"tensor_parallel": {"autotp_size": 2}, "pipeline": {"stages": "auto"}}
    assert split_config(source) == (None, source)
    with pytest.raises(ConfigError, match="3d_tensor"):
        parse_config(source)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"mode": "3d_tensor", "mesch": {}}, 'mesch is not a known key; did you mean "mesh"'),
        ({"mode": "3d_tensor", "mesh": {"batc": 2}}, 'mesh.batc is not a known key; did you mean "batch"'),
        ({"mode": "3d_tensor", "mesh": {}, "tp_overlap_comm": True}, "tp_overlap_comm is not a known key"),
        ({"mode": "3d_tensor", "mesh": {}, "segments": 2}, "tensor_parallel.segments is not a known key"),
        ({"mode": "3d", "mesh": {}}, "mode.*3d_tensor.*given: '3d'"),
        ({"mesh": {"batch": 2}}, "mode is missing"),
        ({"mode": "3d_tensor"}, "mesh is missing"),
        ({"mode": "3d_tensor", "mesh": {"batch": 0}}, "mesh.batch.*greater than or equal to 1"),
        ({"mode": "3d_tensor", "mesh": {"batch": "2"}}, "mesh.batch.*valid integer"),
        ({"mode": "3d_tensor", "mesh": "atuo"}, "mesh: it is a section of keys, or .*'auto' .given: 'atuo'"),
        ({"mode": "3d_tensor", "mesh": "auto"}, 'needs "train_batch_size".*or "size"'),
        ({"mode": "3d_tensor", "mesh": {"batch": 2}, "size": 4}, '"size" is 4, but mesh 2×1×1 has 2 ranks'),
        ({"mode": "3d_tensor", "mesh": {"batch": 2}, "autotp_size": 8}, "autotp_size is 8.*leave autotp_size out"),
    ],
)
def test_errors_name_the_key(section, message):
    with pytest.raises(ConfigError, match=message) as caught:
        split_config({"tensor_parallel": section})
    assert "\n" not in str(caught.value) or "mesh is missing" in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"tensor_parallel": None}, "tensor_parallel is None; it is a section of keys, or left out"),
        ({"tensor_parallel": 7}, "tensor_parallel is 7"),
        ({"checkpoint": "x"}, "checkpoint is 'x'"),
        ({"checkpoint": []}, r"checkpoint is \[\]"),
        ({"tensor_paralel": SECTION}, 'tensor_paralel is not a section of Cuboid.*did you mean "tensor_parallel"'),
    ],
)
def test_a_value_in_place_of_a_section_is_rejected(keys, message):
    with pytest.raises(ConfigError, match=message):
        split_config({"pipeline": PIPELINE, **keys})


def test_misspelt_sections_of_ours_are_not_passed_on():
    for source, message in (
        ({"pipline": PIPELINE}, 'pipline is not a section.*did you mean "pipeline"'),
        ({"pipeline": {"engin": "seq1f1b", "stages": 2}}, 'pipeline.engin is not a known key; did you mean "engine"'),
        ({"pipeline": {"segments": 4, "stages": 2}}, "pipeline.engine is missing"),
        ({"tensor_parallel": SECTION, "pipeline": {"stages": 2}}, "pipeline.engine is missing"),
        ({"tensor_parallel": SECTION, "pipeline": []}, r"pipeline is \[\]"),
        ({"mode": "3d_tensor", "mesh": {}}, "mode is not a section of Cuboid's"),
    ):
        with pytest.raises(ConfigError, match=message):
            own_config(source)
    # A user's own name in another section doesn't count.
    assert own_config({"tensorboard": {"enabled": True, "job_name": "seq1f1b"}}) is None


def test_configs_are_read_as_deepspeed_reads_them_and_its_own_are_left_to_it(tmp_path):
    ours, theirs = tmp_path / "ours.json", tmp_path / "theirs.json"
    text = '{\n  # HJSON\n  tensor_parallel: {mode: "3d_tensor", mesh: {batch: 2,},},\n  "bf16": {"enabled": true}, }'
    ours.write_text(text)
    expected = ({"bf16": {"enabled": True}}, 2)
    for source in (ours, str(ours), base64.urlsafe_b64encode(text.encode()).decode(), text):
        config, rest = own_config(source)
        assert (rest, config.ranks) == expected
    broken = tmp_path / "broken.json"
    broken.write_text(text[:-2])
    with pytest.raises(ConfigError, match=r"broken\.json' can't be read"):
        own_config(broken)
    theirs.write_text(text.replace("3d_tensor", "other").replace("mode", "a").replace("mesh", "b")[:-2])
    # Unreadable, or not a config at all, but without keys of ours: DeepSpeed reports it.
    for source in (theirs, tmp_path, tmp_path / "absent", b"x", None, 7, "x" * 10_000, {"fp16": float("nan")}):
        assert own_config(source) is None


class Tripwire(dict):
    """A config without keys of ours, which must not be copied."""

    def __deepcopy__(self, memo):
        raise AssertionError("it was copied")


def test_a_config_without_our_keys_reaches_deepspeed_as_the_same_object(monkeypatch):
    from cuboid_patches import accelerate, deepspeed

    seen = []

    def initialize(args=None, model=None, config=None, config_params=None):
        seen.append(config if config is not None else config_params if config_params is not None else args)

    patched = deepspeed._initialize(initialize)
    arguments = SimpleNamespace(deepspeed_config="theirs.json", deepscale_config=None)
    for door in ("config", "config_params"):
        for config in (Tripwire({"train_batch_size": 1}), "somewhere.json", "e30="):
            patched(model=torch.nn.Linear(1, 1), **{door: config})
            assert seen.pop() is config
    patched(args=arguments, model=torch.nn.Linear(1, 1))
    assert seen.pop() is arguments
    assert arguments.deepspeed_config == "theirs.json"
    accelerate._hf_deepspeed_config(lambda _, config: seen.append(config))(object(), config)
    assert seen.pop() is config
    deepspeed._tp_model_init(lambda *_, config, **__: seen.append(config))(torch.nn.Linear(1, 1), config=config)
    assert seen.pop() is config
    ours = deepspeed_config()
    for arguments in (
        {"args": SimpleNamespace(deepspeed_config=ours), "config": ours},
        {"args": SimpleNamespace(deepspeed_config=ours, deepscale_config=ours)},
    ):
        with pytest.raises(ConfigError, match="more than one config"):
            patched(model=torch.nn.Linear(1, 1), **arguments)


PIPELINE = {"engine": "seq1f1b", "stages": 2, "segments": 4}


def test_our_pipeline_section_is_removed():
    config, rest = split_config({"pipeline": PIPELINE, "bf16": {"enabled": True}})
    assert rest == {"bf16": {"enabled": True}}
    assert (config.pipeline.stages, config.pipeline.segments, config.ranks) == (2, 4, 2)
    config, rest = split_config(deepspeed_config(pipeline=PIPELINE))
    assert config.ranks == 16
    assert "pipeline" not in rest


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"engine": "gpipe"}, r"pipeline\.engine.*seq1f1b.*given: 'gpipe'"),
        ({"stags": 2}, 'pipeline.stags is not a known key; did you mean "stages"'),
        ({"stages": 0}, r"pipeline\.stages.*greater than or equal to 1"),
        ({"segments": "many"}, r"pipeline\.segments"),
        ({"partition": [64, 64]}, '"partition" has 2 lengths, but "segments" is 4; write "segments": 2'),
        ({"partition": "flop"}, r"pipeline\.partition.*'flops', 'even' or 'measured'"),
        ({"stage_balance": [3]}, '"stage_balance" has 1 numbers for 2 stages'),
        ({"schedule": "1f1b"}, 'whole sequences: write "segments": 1'),
        ({"kv_gradients": "bf16"}, r"pipeline\.kv_gradients"),
        ({"trace_step": 0}, r"pipeline\.trace_step"),
    ],
)
def test_errors_in_the_pipeline_section_name_the_key(keys, message):
    with pytest.raises(ConfigError, match=message):
        split_config({"pipeline": {**PIPELINE, **keys}})


def test_a_pipeline_needs_its_stages_and_no_autotp():
    with pytest.raises(ConfigError, match=r"pipeline\.stages is missing"):
        split_config({"pipeline": {"engine": "seq1f1b"}})
    with pytest.raises(ConfigError, match="not with the tensor_parallel section of AutoTP"):
        split_config({"pipeline": PIPELINE, "tensor_parallel": {"autotp_size": 2, "tp_grain_size": 8}})
    # The key that the patch of accelerate writes into the config is accepted.
    assert split_config({"pipeline": PIPELINE, "tensor_parallel": {"autotp_size": 2}})[0].ranks == 2
    with pytest.raises(ConfigError, match="autotp_size is 4, but 2 ranks hold one copy"):
        split_config({"pipeline": PIPELINE, "tensor_parallel": {"autotp_size": 4}})


@pytest.mark.parametrize(
    ("zero", "message"),
    [
        ({"stage": 1, "offload_param": {"device": "cpu"}}, "offload_param is for stage 3.*offload_optimizer"),
        ({"stage": 1, "offload_optimizer": {"device": "nvme", "nvme_path": "/x"}}, 'device is "nvme".*write "cpu"'),
        ({"stage": 0, "offload_optimizer": {"device": "cpu"}}, "offload_optimizer needs a stage"),
    ],
)
def test_offloading_that_a_mesh_has_no_rule_for_is_rejected(zero, message):
    mesh = {"mode": "3d_tensor", "mesh": {"sequence": 2}}
    config = {"tensor_parallel": mesh, "train_micro_batch_size_per_gpu": 2, "zero_optimization": zero}
    with pytest.raises(ConfigError, match=message):
        check_framework_config(*split_config(config), 2)


@pytest.mark.parametrize(
    ("keys", "world_size", "message"),
    [
        ({"zero_optimization": {"stage": 2}}, 2, "stage 2 would give away gradients.*use stage 1"),
        ({"zero_optimization": {"stage": 3}}, 2, "stage 3.*use stage 1, and"),
        (
            {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}},
            2,
            "offload_optimizer.*without sta",
        ),
        ({"fp16": {"enabled": True}}, 2, "stage 0 with fp16.*pipeline.engine seq1f1b.*use stage 1$"),
        ({"bf16": {"enabled": True}}, 2, "stage 0 with bf16.*use stage 1"),
        ({"train_batch_size": 3}, 2, "train_batch_size is 3"),
        ({"pipeline": {**PIPELINE, "schedule": "1b1f"}}, 2, "schedule is '1b1f'; known: gpipe, 1f1b, seq1f1b"),
    ],
)
def test_settings_that_are_incompatible_with_a_pipeline_are_rejected(keys, world_size, message):
    sections = {"pipeline": PIPELINE, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, **keys}
    config, rest = split_config(sections)
    with pytest.raises(ConfigError, match=message):
        check_framework_config(config, rest, world_size)


def test_a_pipeline_of_one_rank_needs_zero_for_bf16():
    alone = {"pipeline": {**PIPELINE, "stages": 1}, "train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}}
    config, rest = split_config(alone)
    with pytest.raises(ConfigError, match=r"stage 0 with bf16.*in float32 there; use stage 1"):
        check_framework_config(config, rest, 1)
    config, rest = split_config({**alone, "zero_optimization": {"stage": 1}})
    check_framework_config(config, rest, 1)


def test_stages_that_do_not_divide_the_world_are_rejected_with_those_that_do():
    config, rest = split_config({"pipeline": {**PIPELINE, "stages": 4}})
    with pytest.raises(MeshError, match=r"pipeline.stages = 4, 4 in all.*numbers of stages that do.*1, 2, 3, 6"):
        check_framework_config(config, rest, 6)


def test_files_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        load_config(tmp_path / "absent.json")
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    with pytest.raises(ConfigError, match=r"broken\.json' can't be read"):
        load_config(broken)
    broken.write_text("[1]")
    with pytest.raises(ConfigError, match="holds a list"):
        load_config(broken)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"fp16": {"enabled": True}}, "stage 0 with fp16.*3d_tensor.*use stage 1 or 2"),
        (
            {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}, "zero_optimization": {"stage": 1}},
            "fp16_master_weights_and_grads",
        ),
        ({"zero_optimization": {"stage": 3}}, r"stage 3.*mesh\.batch"),
        ({"bf16": {"enabled": True}}, "stage 0 with bf16"),
        ({"hybrid_engine": {"enabled": True}}, "hybrid_engine"),
        ({"compile": {"deepcompile": True}}, r"compile\.deepcompile can't be combined.*under tensor_parallel"),
        ({"compile": True}, "compile at the top level is DeepSpeed's section.*under tensor_parallel"),
        ({"sequence_parallel_size": 2}, "sequence_parallel_size"),
        ({"torch_autocast": {"enabled": True}}, "torch_autocast"),
        ({"train_micro_batch_size_per_gpu": 3}, r"train_micro_batch_size_per_gpu is 3.*such as 4"),
        ({"train_batch_size": 12}, "4 × 1 × 2 = 8; leave train_batch_size out"),
    ],
)
def test_incompatible_settings_are_rejected(keys, message):
    config, rest = split_config(deepspeed_config(**keys))
    with pytest.raises(ConfigError, match=message):
        check_framework_config(config, rest, world_size=16)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"gradient_cliping": 1.0},
            'gradient_cliping is not a key that DeepSpeed reads; did you mean "gradient_clipping"',
        ),
        ({"zero_optimization": {"stage": 7}}, r"zero_optimization\.stage.*given: 7"),
        ({"zero_optimization": {"stag": 1}}, 'zero_optimization.stag is not a key.*did you mean "stage"'),
        ({"zero_optimization": {"stag": "auto"}}, 'zero_optimization.stag is not a key.*did you mean "stage"'),
        ({"zero_optimization": {"offload_optimizer": {"devise": "cpu"}}}, 'devise is not.*did you mean "device"'),
        ({"zero_optimization": {"stage": "3"}}, r"stage 3.*mesh\.batch"),
        ({"zero_optimization": [1]}, "zero_optimization: DeepSpeed can't read it"),
        ({"bf16": {"enabled": "yes"}}, "stage 0 with bf16"),
        ({"bfloat16": {"enabled": True}}, 'bfloat16 .*write "bf16"'),
        ({"data_types": {"grad_acum_dtype": "fp32"}}, 'data_types.grad_acum_dtype.*did you mean "grad_accum_dtype"'),
        ({"gradient_clipping": "x"}, "gradient_clipping.*given: 'x'"),
        ({"gradient_clipping": -1.0}, "gradient_clipping.*greater than or equal to 0"),
        ({"gradient_clipping": float("nan")}, "gradient_clipping is nan"),
        ({"train_micro_batch_size_per_gpu": True}, "train_micro_batch_size_per_gpu.*given: True"),
        ({"train_batch_size": 10**30}, "train_batch_size is a number of 100 bits"),
        ({"optimizer": {"typ": "AdamW"}}, "optimizer.typ is not a key that DeepSpeed reads"),
        ({"optimizer": {"params": {}}}, "optimizer.type is missing"),
        ({"optimizer": {"type": "AdamV"}}, "optimizer.type is 'AdamV'.*did you mean"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": -1}}}, "optimizer.params.lr.*greater than or equal to 0"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": "1e-4"}}}, "optimizer.params.lr.*given: '1e-4'"),
        ({"optimizer": {"type": "AdamW", "params": {"beta": [0.9]}}}, 'params.beta is not.*did you mean "betas"'),
        ({"optimizer": {"type": "SGD", "params": {"nesterov": True}}}, "optimizer.params .*Nesterov"),
        ({"scheduler": {"type": "WarmUpLR", "params": {}}}, 'WarmUpLR.*did you mean "WarmupLR"'),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 1.5}}}, "warmup_num_steps is 1.5.*int"),
    ],
)
def test_errors_that_deepspeed_would_find_late_or_never_are_found(keys, message):
    with pytest.raises(ConfigError, match=message):
        check_framework_config(*split_config(deepspeed_config(**keys)), world_size=16)


def test_every_key_that_deepspeed_knows_is_accepted():
    """The keys on DeepSpeed's documentation pages, with their values there."""
    with_auto = {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto"}}}
    keys = {
        "steps_per_print": float("inf"),
        "communication_data_type": "fp32",
        "prescale_gradients": False,
        "gradient_predivide_factor": 1.0,
        "gradient_clipping": "auto",
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "wall_clock_breakdown": False,
        "memory_breakdown": False,
        "dump_state": False,
        "disable_allgather": False,
        "dataloader_drop_last": True,
        "flops_profiler": {"enabled": False, "profile_step": 1},
        "tensorboard": {"enabled": False, "output_path": "x", "job_name": "y"},
        "wandb": {"enabled": False},
        "csv_monitor": {"enabled": False},
        "comms_logger": {"enabled": False, "verbose": False, "prof_all": True, "debug": False},
        "activation_checkpointing": {"partition_activations": False, "number_checkpoints": None, "profile": False},
        "aio": {"block_size": 1048576, "queue_depth": 8, "intra_op_parallelism": 1, "single_submit": False},
        "data_types": {"grad_accum_dtype": "fp32"},
        "timers": {"throughput": {"enabled": True, "synchronized": True}},
        "compile": {"deepcompile": False},
        "vocabulary_size": 1024,
        "_comment": "for people",
        "zero_optimization": {"stage": 1, "reduce_bucket_size": "auto", "overlap_comm": True},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_num_steps": "auto"}},
        **with_auto,
    }
    config, rest = split_config(deepspeed_config(**keys))
    check_framework_config(config, rest, world_size=8)
    with pytest.raises(ConfigError, match='gradient_clipping is "auto", which only the HF Trainer'):
        check_framework_config(config, rest, world_size=8, is_complete=True)


@pytest.mark.parametrize("total", [8, 64])
def test_both_ways_to_count_a_batch_are_accepted(total):
    config, rest = split_config(deepspeed_config(train_batch_size=total))
    check_framework_config(config, rest, world_size=16)


def test_steps_of_accumulation_that_deepspeed_derives_are_accepted():
    config, rest = split_config(deepspeed_config(train_batch_size=32))
    check_framework_config(config, rest, world_size=16)
    config, rest = split_config(deepspeed_config(train_batch_size=32, gradient_accumulation_steps=2))
    with pytest.raises(ConfigError, match="4 × 2 × 2 = 16; leave train_batch_size out"):
        check_framework_config(config, rest, world_size=16)


def test_disabled_sections_and_auto_values_are_accepted():
    config, rest = split_config(
        deepspeed_config(
            fp16={"enabled": "auto"},
            hybrid_engine={"enabled": False},
            compile={"deepcompile": False},
            sequence_parallel_size=1,
            train_batch_size="auto",
            train_micro_batch_size_per_gpu="auto",
        )
    )
    check_framework_config(config, rest, world_size=8)


def test_a_mesh_that_does_not_fit_the_world_names_those_that_do():
    config, rest = split_config(deepspeed_config())
    with pytest.raises(
        MeshError, match=r"8 ranks, doesn't divide the world of 6 .*1, 2, 3, 6.*nearest.*1×2×3"
    ) as error:
        check_framework_config(config, rest, world_size=6)
    assert "2×2×2" in str(error.value)
