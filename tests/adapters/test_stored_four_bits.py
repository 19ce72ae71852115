"""Checkpoints that bitsandbytes has stored in 4 bits, and memory while weights are read into 4 bits."""

import functools
import json
import logging
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_four_bits import adapter, apart, config_of, four_bits, on_mesh, plain, small, trained_plain, trained_sharded
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

import cuboid
from comparing import mesh_section
from cuboid.checkpoint.format.tensor_file import TensorFile
from cuboid.config.schema import parse_config
from cuboid.convert.run import ConvertOptions, convert
from cuboid.distributed.topology import MeshShape
from cuboid.errors import CheckpointError, UnsupportedModelError
from cuboid.tensor3d.sharding.sharding_spec import put_shard
from threaded import ThreadWorld
from training import ranks_of

pytest.importorskip("peft", reason="PEFT isn't installed")
bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes isn't installed")

NESTED = {"bnb_4bit_use_double_quant": True}


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """The folder of a model that plain transformers has stored in 4 bits."""

    @functools.cache
    def written(dtype=torch.float32, layers=2, **options):
        options = {name: list(value) if isinstance(value, tuple) else value for name, value in options.items()}
        folder = tmp_path_factory.mktemp("stored")
        small(num_hidden_layers=layers).save_pretrained(folder / "whole")
        quantised = AutoModelForCausalLM.from_pretrained(
            folder / "whole", dtype=dtype, quantization_config=four_bits(**options)
        )
        quantised.save_pretrained(folder / "stored")
        return folder / "stored"

    return written


SKIPPED = {"llm_int8_skip_modules": ("lm_head", "k_proj")}


@pytest.mark.sample(2, ci="others")
@pytest.mark.parametrize(
    ("mesh", "options"),
    [("1x2x1", NESTED), ("1x1x2", {"bnb_4bit_quant_type": "fp4"}), ("2x1x1", NESTED), ("1x2x2", SKIPPED)],
)
def test_the_loss_and_every_gradient_are_those_of_plain_transformers(stored, mesh, options):
    path = stored(**options)
    expected_loss, expected = plain(path, None, {})
    losses, gathered, packed = on_mesh(path, mesh, None, {})
    assert losses == pytest.approx([expected_loss] * len(losses), rel=1e-6)
    assert apart(gathered, expected) < 1e-5
    elements = 2 * (256 * (256 + (128 if options is SKIPPED else 256) + 256) + 3 * 256 * 512)
    assert packed == [elements * 9 // 16 // len(packed)] * len(packed)


@pytest.mark.sample(2, ci="others")
@pytest.mark.parametrize(
    ("mesh", "dtype", "options"),
    [
        ("1x1x1", torch.float16, NESTED),
        ("3x1x2", torch.bfloat16, {"bnb_4bit_quant_storage": torch.bfloat16, **NESTED}),
        ("2x2x2", torch.float32, {"bnb_4bit_quant_storage": torch.float32}),
    ],
)
def test_every_weight_has_the_value_that_bitsandbytes_restores(stored, mesh, dtype, options):
    path = stored(dtype, **options)

    def run():
        model = load(path, mesh, dtype=dtype)
        layers = {
            name: x for name, x in model.named_modules() if isinstance(x, nn.Linear) and x.weight.dtype == torch.uint8
        }
        return cuboid.mesh_of(model), {name: (x.shard_values("weight"), x.spec("weight")) for name, x in layers.items()}

    reference = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    gathered = {}
    for place, layers in ThreadWorld().run(MeshShape.parse(mesh).size, run):
        for name, (shard, spec) in layers.items():
            full = gathered.setdefault(name, torch.full(spec.shape, torch.nan, dtype=dtype))
            put_shard(full, shard, spec, place.shape, place.coordinate)
    assert len(gathered) == 14
    for name, full in gathered.items():
        weight = reference.get_submodule(name).weight
        assert torch.equal(full, bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state))


def load(path, mesh="1x1x1", **options):
    return cuboid.from_pretrained(str(path), {"tensor_parallel": mesh_section(mesh)}, **options)


def test_a_call_has_the_settings_of_the_checkpoint_and_says_so(stored, caplog):
    path = stored(**NESTED)
    with caplog.at_level(logging.WARNING, logger="cuboid"):
        same = load(path, quantization_config=four_bits(**NESTED))
        assert not caplog.records
        other = load(path, quantization_config=four_bits(torch.bfloat16))
    assert "isn't used" in caplog.text
    for model in (same, other):
        assert model.is_loaded_in_4bit
        assert model.model.layers[0].self_attn.q_proj.sharded_params["weight"].four_bits.dtype == torch.float32


WEIGHT = "model.layers.1.mlp.up_proj.weight"
STATE = f"{WEIGHT}.quant_state.bitsandbytes__nf4"


def state_with(**values):
    """A change of the JSON that describes a weight."""

    def change(tensors):
        state = json.loads(bytes(tensors[STATE].tolist())) | values
        tensors[STATE] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)

    return change


def without(name):
    return lambda tensors: tensors.pop(name)


def tensor_with(name, change):
    def changed(tensors):
        tensors[name] = change(tensors[name]).contiguous()

    return changed


DAMAGE = {
    "blocks": (state_with(blocksize=128), UnsupportedModelError, "up_proj.weight has blocks of 128 elements"),
    "nested blocks": (state_with(nested_blocksize=64), UnsupportedModelError, r"blocks of 64 elements \(nested"),
    "other values": (state_with(quant_type="fp4"), CheckpointError, "damaged: .* says 'fp4'"),
    "dtype": (state_with(dtype="__class__"), CheckpointError, "damaged: .* says 'nf4' and '__class__'"),
    "shape": (state_with(shape=[512, 255]), CheckpointError, "damaged: its absmax is"),
    "transposed shape": (state_with(shape=[256, 512]), CheckpointError, r"is \[256, 512\], and the model's"),
    "huge shape": (state_with(shape=[1 << 40, 1 << 40]), CheckpointError, "damaged: its absmax is"),
    "no shape": (state_with(shape=None), CheckpointError, "damaged: .* says that the shape is None"),
    "offset": (state_with(nested_offset="0"), CheckpointError, "damaged: .* an offset of '0'"),
    "key": (state_with(more=1), CheckpointError, "damaged: .* doesn't have the keys"),
    "no JSON": (tensor_with(STATE, lambda x: x[1:]), CheckpointError, "isn't JSON"),
    "long": (tensor_with(STATE, lambda x: x.repeat(100)), CheckpointError, "no text of at most 4,096 bytes"),
    "no scales": (without(f"{WEIGHT}.absmax"), CheckpointError, "damaged: beside it are nested_absmax"),
    "no weight": (without(WEIGHT), CheckpointError, f"has the scales of {WEIGHT}, and not the weight"),
    "scales": (tensor_with(f"{WEIGHT}.absmax", lambda x: x[1:]), CheckpointError, "damaged: its absmax is"),
    "scales of scales": (tensor_with(f"{WEIGHT}.nested_absmax", lambda x: x.half()), CheckpointError, "nested_absmax"),
    "elements": (tensor_with(WEIGHT, lambda x: x[:-1]), CheckpointError, "aren't 4 bits each of 131,072"),
    "map": (tensor_with(f"{WEIGHT}.quant_map", lambda x: -x), CheckpointError, "quant_map doesn't have the values"),
    "16 bits": (
        lambda tensors: [tensors.pop(name) for name in [*tensors] if name.startswith(f"{WEIGHT}.")],
        CheckpointError,
        f"{WEIGHT} isn't stored in 4 bits",
    ),
}


@pytest.mark.sample(6, ci="others")
@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found_before_anything_is_decoded(stored, tmp_path, damage):
    change, error, said = DAMAGE[damage]
    folder = shutil.copytree(stored(**NESTED), tmp_path / "damaged")
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(error, match=said):
        load(folder, "1x1x1")


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"quant_method": "gptq", "bits": 4}, UnsupportedModelError, r"quant_method 'gptq'\) has no rule"),
        ({"load_in_4bit": False, "_load_in_4bit": False, "load_in_8bit": True}, UnsupportedModelError, "has no rule"),
        ({"llm_int8_skip_modules": ["lm_head", "up_proj"]}, UnsupportedModelError, "up_proj.weight is stored in 4"),
        ({"bnb_4bit_quant_type": "fp4"}, CheckpointError, "is stored as nf4, and"),
    ],
)
def test_a_config_of_other_weights_is_refused(stored, tmp_path, changes, error, said):
    folder = shutil.copytree(stored(**NESTED), tmp_path / "other")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"].update(changes)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(error, match=said):
        load(folder)


class LiveBytes(TorchDispatchMode):
    """The largest sum of bytes of the tensors that operations were given, or made, as long as they live."""

    def __init__(self):
        super().__init__()
        self._live, self.peak = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves((args, kwargs, out)):
            if type(x) in (torch.Tensor, torch.nn.Parameter) and x.device.type == "cpu":
                storage = x.untyped_storage()
                self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._live = {key: entry for key, entry in self._live.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._live.values()))
        return out


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize("options", [{}, NESTED], ids=["16 bits", "4 bits"])
def test_weights_are_held_in_4_bits_while_others_are_read(stored, options):
    path, asked = stored(layers=6, **options), {}
    if not options:
        path, asked = path.parent / "whole", {"quantization_config": four_bits()}
    with LiveBytes() as live:
        model = load(path, dtype=torch.float32, **asked)
    kept = sum(x.nbytes for x in model.parameters())
    # One weight more, whole and as bytes.
    assert live.peak < kept + 2 * 4 * 256 * 512


@pytest.mark.parametrize("source", ["stored", "whole"])
def test_there_are_no_per_rank_files_of_weights_in_4_bits(stored, tmp_path, source):
    path, config = stored(**NESTED), parse_config({"tensor_parallel": mesh_section("1x2x1")})
    # Weights of 16 bits beside a config that says 4 would be read as if they were.
    options = {"model": path} if source == "whole" else {"config": config}
    error = UnsupportedModelError if source == "stored" else CheckpointError
    with pytest.raises(error, match=r"stored.config\.json: has a quantization_config, and .*before it was quantized"):
        convert(ConvertOptions(path.parent / source, tmp_path / "ranks", quiet=True, **options), print)
    assert not list(tmp_path.iterdir())


@pytest.mark.ci
def test_training_in_stages_and_resuming_are_those_of_plain_transformers(pool, tmp_path):
    small(vocab_size=131).save_pretrained(tmp_path / "whole")
    path, folder = str(tmp_path / "stored"), adapter((("init_lora_weights", False), ("vocabulary", 131)))
    AutoModelForCausalLM.from_pretrained(
        tmp_path / "whole", dtype=torch.float32, quantization_config=four_bits(**NESTED)
    ).save_pretrained(path)
    config, resumed = config_of("1x2x1", 2, schedule="zero_bubble"), config_of("2x1x2", None)
    arguments = path, folder, config, resumed, str(tmp_path / "out")
    results = pool.run(ranks_of(config), trained_sharded, *arguments, timeout_s=120.0)
    losses, norm, _ = trained_plain(path, folder)
    for rank_losses, rank_norm in results:
        assert rank_losses == pytest.approx(losses, rel=5e-6)
        assert rank_norm == pytest.approx(norm, rel=1e-4)


def read_here(path):
    """The bytes of the weights that are kept in 4 bits, and how many bytes of the files this rank has read."""
    read, original = [], TensorFile.read

    def counted(self, name, box=None):
        values = original(self, name, box)
        read.append(values.nbytes)
        return values

    TensorFile.read = counted
    try:
        model = load(path, "1x1x1", dtype=torch.float32)
    finally:
        TensorFile.read = original
    return {name: x.detach().clone() for name, x in model.named_parameters() if x.dtype == torch.uint8}, sum(read)


def test_replicas_are_sent_what_one_rank_has_read(pool, stored):
    path = str(stored(**NESTED))
    (first, read), (second, read_too) = pool.run(2, read_here, path)
    alone = {name: x for name, x in load(path).named_parameters() if x.dtype == torch.uint8}
    for packed in (first, second):
        assert packed.keys() == alone.keys()
        assert all(torch.equal(x, alone[name]) for name, x in packed.items())
    # What describes the weights is read and checked by each.
    assert read_too < read / 20
