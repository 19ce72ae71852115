"""What Cuboid changes in other packages: exactly that, only that, and back again."""

import importlib
import json
import os
import re
import sys
import textwrap
from distutils.core import run_setup
from importlib.metadata import PackageNotFoundError

import accelerate
import deepspeed
import pytest
import transformers
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from transformers.modeling_utils import AttentionInterface
from transformers.utils.generic import GeneralInterface

import cuboid
from cuboid import requirements
from cuboid_patches.base import Patch, PatchError
from cuboid_patches.deepspeed import SHARED_MEMORY_BUILD
from launching import ROOT, as_ranks, run, torchrun, world


def touched():
    """Everything that the patches replace, as it is now."""
    return {
        "initialize": vars(deepspeed)["initialize"],
        "tp_model_init": vars(deepspeed)["tp_model_init"],
        "from_pretrained": vars(transformers.PreTrainedModel)["from_pretrained"],
        "HfDeepSpeedConfig": vars(accelerate.utils.deepspeed.HfDeepSpeedConfig)["__init__"],
        "num_processes": vars(accelerate.Accelerator)["num_processes"],
        "gather": vars(accelerate.utils.operations)["_gpu_gather"],
        "save_model": vars(transformers.Trainer)["save_model"],
        "Trainer": vars(transformers.Trainer)["__init__"],
        "excepthook": sys.excepthook,
        "attention": vars(AttentionInterface)["get_interface"],
        "functions": vars(GeneralInterface)["__getitem__"],
    }


@pytest.fixture
def unregistered():
    cuboid.unregister()
    yield touched()
    cuboid.register()


def test_unregister_restores_the_very_same_objects(unregistered):
    cuboid.register()
    patched = touched()
    assert all(patched[name] is not original for name, original in unregistered.items())
    cuboid.register()
    assert touched() == patched
    cuboid.unregister()
    for name, original in unregistered.items():
        assert touched()[name] == original
    cuboid.unregister()
    assert touched() == unregistered


def test_a_build_that_was_skipped_for_a_config_of_ours_is_offered_again(monkeypatch):
    offered = {"deepspeed_shm_comm": True}
    monkeypatch.setattr(deepspeed.ops, "__compatible_ops__", offered)
    monkeypatch.setattr(SHARED_MEMORY_BUILD, "_original", None)
    SHARED_MEMORY_BUILD.apply()
    assert offered["deepspeed_shm_comm"]
    SHARED_MEMORY_BUILD.skip()
    SHARED_MEMORY_BUILD.skip()
    assert not offered["deepspeed_shm_comm"]
    SHARED_MEMORY_BUILD.revert()
    assert offered["deepspeed_shm_comm"]


def test_deepspeed_itself_refuses_our_keys_without_us(unregistered):
    section = {"mode": "3d_tensor", "mesh": {"batch": 1}}
    with pytest.raises(Exception, match="mode"):
        deepspeed.runtime.config.DeepSpeedConfig({"train_batch_size": 1, "tensor_parallel": section})


def test_a_target_with_another_signature_is_refused_with_both_versions():
    patch = Patch(
        target="deepspeed:initialize",
        package="deepspeed",
        reason="test",
        parameters=("model", "turbo"),
        replace=lambda original: original,
    )
    before = deepspeed.initialize
    with pytest.raises(PatchError, match=rf"deepspeed {deepspeed.__version__}.* without turbo.*deepspeed >=0"):
        patch.apply()
    assert deepspeed.initialize is before
    patch.target = "deepspeed:absent"
    with pytest.raises(PatchError, match="does not exist"):
        patch.apply()


def test_every_requirement_is_pinned_to_a_version_that_it_takes():
    # `make install` installs what is pinned, and Cuboid without its requirements.
    lines = (ROOT / "configs" / "requirements.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    versions = {canonicalize_name(name): version for name, version in pins.items()}
    for requirement in map(Requirement, run_setup(ROOT / "setup.py", stop_after="init").install_requires):
        assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)]), requirement


def late(tmp_path, monkeypatch, name, parameters=()):
    """A patch of a module that nobody has imported yet: its function gives 2 instead of 1."""
    (tmp_path / f"{name}.py").write_text("def number():\n    return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    return Patch(
        target=f"{name}:number", package="deepspeed", reason="test", parameters=parameters, replace=lambda _: lambda: 2
    )


def test_a_module_that_is_imported_later_is_patched_then(tmp_path, monkeypatch):
    patch = late(tmp_path, monkeypatch, "imported_later")
    patch.apply()
    patch.apply()
    assert "imported_later" not in sys.modules
    module = importlib.import_module("imported_later")
    assert module.number() == 2
    patch.revert()
    assert module.number() == 1


def test_a_patch_that_is_taken_back_before_its_module_is_imported_does_nothing(tmp_path, monkeypatch):
    patch = late(tmp_path, monkeypatch, "imported_never")
    patch.apply()
    patch.revert()
    assert importlib.import_module("imported_never").number() == 1


def test_a_module_that_is_imported_later_with_another_signature_is_refused_then(tmp_path, monkeypatch):
    late(tmp_path, monkeypatch, "imported_changed", ("turbo",)).apply()
    with pytest.raises(PatchError, match=r"imported_changed:number .* without turbo"):
        importlib.import_module("imported_changed")


@pytest.mark.parametrize(
    ("package", "installed", "message"),
    [
        ("transformers", "5.15.0", "cuboid works with transformers >=5.16,<5.25, but 5.15.0 is installed"),
        ("accelerate", "1.9.0", "cuboid works with accelerate >=1.10,<1.16, but 1.9.0 is installed"),
        ("torch", None, "cuboid needs torch >=2.9,<2.16, which is not installed"),
        ("deepspeed", "0.19.9+abc", None),
        ("torch", "2.13.0.dev1+cpu", None),
    ],
)
def test_other_versions_are_refused_in_one_sentence(monkeypatch, package, installed, message):
    def version(name):
        if name == package and installed is None:
            raise PackageNotFoundError
        return installed if name == package else original(name)

    original = requirements.version
    monkeypatch.setattr(requirements, "version", version)
    if message is None:
        requirements.check_installed()
        return
    with pytest.raises(ImportError, match=re.escape(message)):
        requirements.check_installed()


@pytest.mark.parametrize(
    ("installed", "is_known"), [("0.19.1", False), ("0.20.0", True), ("0.21.2", True), ("0.22.0", False)]
)
def test_other_versions_of_peft_are_refused_where_adapters_are_made(monkeypatch, installed, is_known):
    monkeypatch.setattr(requirements, "version", lambda _: installed)
    if is_known:
        requirements.check_version("peft")
        return
    with pytest.raises(
        ImportError, match=f"^cuboid works with peft >=0.20,<0.22, but {installed} is installed: pip install"
    ):
        requirements.check_version("peft")


@pytest.mark.parametrize(
    ("installed", "source", "message"),
    [
        (
            "5.15.0",
            "raise SystemExit('imported')",
            "ImportError: cuboid works with transformers >=5.16,<5.25, but 5.15.0",
        ),
        # Not what patches, which can't be imported either, then fail by.
        ("5.23.0", "from nowhere import everything", "ModuleNotFoundError: No module named 'nowhere'"),
    ],
)
def test_a_package_that_cant_be_used_is_what_the_last_line_is_about(tmp_path, installed, source, message):
    (tmp_path / "transformers.py").write_text(source)
    metadata = tmp_path / f"transformers-{installed}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: transformers\nVersion: {installed}\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    status, output = run(sys.executable, "-c", "import cuboid\nimport transformers", PYTHONPATH=path)
    assert status == 1
    assert output.splitlines()[-1].startswith(message)


OTHERS = """
    import os, sys, json
    if os.environ["WITH_CUBOID"] == "yes":
        import cuboid
    import deepspeed, torch
    from transformers import AutoModelForCausalLM, LlamaConfig
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    losses = {}
    modes = {"zero": {"zero_optimization": {"stage": 1}}, "autotp": {"tensor_parallel": {"autotp_size": 2}}}
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
    for name, keys in modes.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64,
            num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4))
        config = {"train_micro_batch_size_per_gpu": 2, "optimizer": optimizer, **keys}
        engine, *_ = deepspeed.initialize(model=model, config=config)
        ids = torch.arange(24).view(2, 12)
        losses[name] = []
        for _ in range(3):
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
            losses[name].append(loss.item())
        losses[name].append(type(engine).__name__)
    if os.environ["RANK"] == "0":
        print("RESULT" + json.dumps(losses))
    # A rank that leaves first would take the other one's connections along.
    torch.distributed.destroy_process_group()
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    def write(text):
        path = tmp_path_factory.mktemp("script") / "script.py"
        path.write_text(textwrap.dedent(text))
        return path

    return write


@pytest.mark.ci
def test_autotp_and_plain_zero_run_as_before(script):
    results = {}
    for with_cuboid in ("no", "yes"):
        # Without, from the start in processes that have never seen Cuboid.
        launch = world if with_cuboid == "yes" else torchrun
        status, output = launch(2, script(OTHERS), WITH_CUBOID=with_cuboid)
        assert status == 0, output
        line = next(line for line in output.splitlines() if line.startswith("RESULT"))
        results[with_cuboid] = json.loads(line.removeprefix("RESULT"))
    assert results["yes"] == results["no"]
    assert results["yes"]["zero"][-1] == results["yes"]["autotp"][-1] == "DeepSpeedEngine"
    assert results["yes"]["zero"][2] < results["yes"]["zero"][0]


MISTAKES = """
    import sys
    import cuboid
    from transformers import AutoModelForCausalLM, LlamaConfig
    import deepspeed, torch, torch.distributed as dist
    mesh = {"batch": 1, "sequence": 1, "hidden": 2}
    config = {"train_micro_batch_size_per_gpu": 2, "tensor_parallel": {"mode": "3d_tensor", "mesh": mesh}}
    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4)
    mistake = sys.argv[1]
    if mistake == "key":
        mesh["hiden"] = mesh.pop("hidden")
    if mistake == "world":
        mesh["batch"] = 3
    if mistake == "width":
        sizes.update(hidden_size=33, head_dim=8, num_attention_heads=3, num_key_value_heads=3)
    if mistake == "zero":
        config["zero_optimization"] = {"stage": 3}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes))
    try:
        deepspeed.initialize(model=model, config=config)
    finally:
        assert not dist.is_initialized()
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("key", 'cuboid: ConfigError: tensor_parallel.mesh.hiden is not a known key; did you mean "hidden"?'),
        ("world", "cuboid: MeshError: tensor_parallel.mesh 3×1×2, 6 ranks, doesn't divide the world of 2"),
        ("width", "cuboid: MeshError: tensor_parallel.mesh 1×1×2 (batch × sequence × hidden) can't cut LlamaFor"),
        ("zero", "cuboid: ConfigError: zero_optimization.stage 3 would split parameters that the mesh splits"),
    ],
)
def test_a_mistake_is_told_once_and_every_rank_fails(script, mistake, message):
    path = script(MISTAKES)
    (first_status, first), (second_status, second) = as_ranks(2, path, mistake)
    line = 1 + next(n for n, text in enumerate(path.read_text().splitlines()) if "deepspeed.initialize(" in text)
    assert first_status != 0
    assert second_status != 0
    assert message in first
    assert first.rstrip().endswith(f"({path}:{line})"), "where the script called what raised"
    assert "Traceback" not in first + second
    assert "cuboid:" not in second
