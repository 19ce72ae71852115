"""What users write: keys, types, near misses, and the framework's settings beside them."""

import json

import pytest

from cuboid.compatibility import check_framework_config
from cuboid.config import load_config, parse_config, split_config
from cuboid.errors import ConfigError, MeshError

SECTION = {"mode": "3d_tensor", "mesh": {"batch": 2, "sequence": 2, "hidden": 2}}


def deepspeed_config(**keys):
    return {"tensor_parallel": SECTION, "train_micro_batch_size_per_gpu": 4, **keys}


def test_own_keys_are_taken_out_and_the_rest_is_untouched():
    source = deepspeed_config(zero_optimization={"stage": 1})
    config, rest = split_config(source)
    assert str(config.tensor_parallel.mesh.shape) == "2×2×2"
    assert rest == {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1}}
    assert source["tensor_parallel"] is SECTION


@pytest.mark.parametrize("suffix", ["json", "yaml", "yml"])
def test_json_and_yaml_say_the_same(tmp_path, suffix):
    path = tmp_path / f"config.{suffix}"
    yaml_text = "tensor_parallel: {mode: 3d_tensor, mesh: {batch: 2, sequence: 2, hidden: 2}}\nbf16: {enabled: true}\n"
    json_text = json.dumps({"tensor_parallel": SECTION, "bf16": {"enabled": True}})
    path.write_text(json_text if suffix == "json" else yaml_text)
    config, rest = split_config(path)
    assert config.tensor_parallel.mesh_size == 8
    assert rest == {"bf16": {"enabled": True}}


def test_a_config_without_our_keys_is_not_ours():
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
        ({"mode": "3d", "mesh": {}}, "mode.*3d_tensor.*given: '3d'"),
        ({"mesh": {"batch": 2}}, "mode is missing"),
        ({"mode": "3d_tensor"}, "mesh is missing"),
        ({"mode": "3d_tensor", "mesh": {"batch": 0}}, "mesh.batch.*greater than or equal to 1"),
        ({"mode": "3d_tensor", "mesh": {"batch": "2"}}, "mesh.batch.*valid integer"),
        ({"mode": "3d_tensor", "mesh": "auto"}, 'needs "size"'),
        ({"mode": "3d_tensor", "mesh": {"batch": 2}, "size": 4}, '"size" is 4, but mesh 2×1×1 has 2 ranks'),
        ({"mode": "3d_tensor", "mesh": {"batch": 2}, "autotp_size": 8}, "autotp_size is 8.*leave autotp_size out"),
    ],
)
def test_mistakes_are_named(section, message):
    with pytest.raises(ConfigError, match=message):
        split_config({"tensor_parallel": section})


def test_a_pipeline_engine_that_does_not_exist_is_not_ignored():
    with pytest.raises(ConfigError, match=r"pipeline\.engine"):
        split_config(deepspeed_config(pipeline={"engine": "seq1f1b", "stages": 2}))


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
        ({"fp16": {"enabled": True}}, "fp16"),
        ({"zero_optimization": {"stage": 3}}, r"stage 3.*mesh\.batch"),
        ({"bf16": {"enabled": True}}, "stage 0 with bf16"),
        ({"hybrid_engine": {"enabled": True}}, "hybrid_engine"),
        ({"sequence_parallel_size": 2}, "sequence_parallel_size"),
        ({"torch_autocast": {"enabled": True}}, "torch_autocast"),
        ({"train_micro_batch_size_per_gpu": 3}, r"train_micro_batch_size_per_gpu is 3.*such as 4"),
        ({"train_batch_size": 12}, "4 × 1 × 2 = 8; leave train_batch_size out"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(keys, message):
    config, rest = split_config(deepspeed_config(**keys))
    with pytest.raises(ConfigError, match=message):
        check_framework_config(config, rest, world_size=16)


@pytest.mark.parametrize("total", [8, 64])
def test_both_ways_to_count_a_batch_are_accepted(total):
    config, rest = split_config(deepspeed_config(train_batch_size=total))
    check_framework_config(config, rest, world_size=16)


def test_disabled_sections_and_trainer_placeholders_pass():
    config, rest = split_config(
        deepspeed_config(
            fp16={"enabled": "auto"},
            hybrid_engine={"enabled": False},
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
