"""`cuboid verify --adapter`: a model with an adapter of PEFT beside plain PEFT, and folders that are no adapter."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_verify_tasks import config_of
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from typer.testing import CliRunner

from cuboid import CuboidError
from cuboid.cli import commands
from cuboid.verify import Plan, SmallModel, verify
from mutations import BY_NAME
from mutations.pool import MutatedPool

pytest.importorskip("peft", reason="PEFT isn't installed")
from peft import LoraConfig, get_peft_model

from cuboid.integrations.peft.adapter_check import check_adapter_folder

TIMEOUT_S = 240
TARGETS = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"


def written(folder, auto_class, architecture, **options):
    """A checkpoint, and an adapter of plain PEFT for it whose factors have values."""
    small = SmallModel(architecture, heads=4, kv_heads=2)
    config = small.config()
    config.update({"num_labels": 2, "pad_token_id": 0} if auto_class is not AutoModelForCausalLM else {})
    torch.manual_seed(0)
    model = auto_class.from_config(config)
    model.save_pretrained(folder / "model")
    lora = {"r": 4, "lora_alpha": 8, "target_modules": TARGETS, "init_lora_weights": False, **options}
    get_peft_model(model, LoraConfig(**lora)).save_pretrained(folder / "adapter")
    return str(folder / "model"), str(folder / "adapter")


@pytest.fixture(scope="module")
def causal(tmp_path_factory):
    folder = tmp_path_factory.mktemp("causal")
    return written(folder, AutoModelForCausalLM, "llama", task_type="CAUSAL_LM", lora_dropout=0.1)


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize(
    "config",
    [
        pytest.param(config_of("1x2x2"), marks=pytest.mark.slow),
        config_of(stages=2, segments=3),
        config_of("2x1x1", stages=2, segments=2),
    ],
    ids=["mesh", "stages", "both"],
)
def test_an_adapter_is_compared_with_plain_peft(pool, causal, config):
    model, adapter = causal
    plan = Plan(model, batch=4, accumulate=2, adapter=adapter)
    report = verify(plan, config, passes=("core",), pool=pool, timeout_s=TIMEOUT_S)
    (core,) = report.passes
    assert report.passed, core.first_difference
    gradients = {check.name for check in core.checks if check.kind == "gradient"}
    assert len(gradients) == 2 * 2 * len(TARGETS)
    assert all(".lora_A." in name or ".lora_B." in name for name in gradients)
    assert all(check.magnitude > 0 for check in core.checks if check.kind == "gradient")
    assert {check.name for check in core.checks if check.kind == "weight"} == set(load_file(f"{adapter}/{TENSORS}"))


@pytest.mark.slow
def test_modules_that_are_trained_whole(pool, tmp_path):
    names = ["embed_tokens", "lm_head", "norm"]
    model, adapter = written(tmp_path, AutoModelForCausalLM, "llama", task_type="CAUSAL_LM", modules_to_save=names)
    plan = Plan(model, batch=4, accumulate=2, adapter=adapter)
    report = verify(plan, config_of("1x2x1", stages=2, segments=2), pool=pool, timeout_s=TIMEOUT_S)
    assert report.passed, [compared.first_difference for compared in report.passes]
    for compared, kind in zip(report.passes, ("gradient", "moment"), strict=True):
        checked = [check.name for check in compared.checks if check.kind == kind]
        assert all(any(f"{name}.modules_to_save." in other for other in checked) for name in names)


@pytest.mark.ci
def test_a_classifiers_head_magnitudes_and_the_engine(tmp_path):
    model, adapter = written(tmp_path, AutoModelForSequenceClassification, "llama", task_type="SEQ_CLS", use_dora=True)
    plan = Plan(model, batch=4, accumulate=2, adapter=adapter)
    report = verify(plan, config_of("1x2x1", stages=2, segments=1), timeout_s=TIMEOUT_S)
    assert report.passed, [compared.first_difference for compared in report.passes]
    core, engine = report.passes
    assert any("score" in check.name for check in core.checks if check.kind == "gradient")
    for part in ("score", "lora_magnitude_vector"):
        assert any(part in check.name for check in engine.checks if check.kind == "moment")


@pytest.mark.ci
def test_a_mistake_in_the_factors_gradients_is_found(causal):
    model, adapter = causal
    mutation = BY_NAME["all gradients × 1.02"]
    with MutatedPool(2) as mutated:
        mutated.mutation = mutation.name
        plan = Plan(model, batch=4, accumulate=2, adapter=adapter)
        report = verify(plan, config_of("1x2x1"), passes=("core",), pool=mutated, timeout_s=TIMEOUT_S)
    wrong = {check.name for check in report.passes[0].checks if check.kind == "gradient" and not check.passed}
    assert any(".lora_A." in name for name in wrong)
    assert any(".lora_B." in name for name in wrong)


def options(**changes):
    """Change an adapter's config."""

    def change(folder):
        path = folder / CONFIG
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def tensors(change):
    """Change the dict of an adapter's tensors."""

    def rewrite(folder):
        state = load_file(folder / TENSORS)
        change(state)
        save_file(state, folder / TENSORS)

    return rewrite


def pickled(folder):
    torch.save(load_file(folder / TENSORS), folder / "adapter_model.bin")
    (folder / TENSORS).unlink()


def link(folder):
    (folder / TENSORS).unlink()
    (folder / TENSORS).symlink_to("/etc/hostname")


FACTOR = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
DAMAGES = {
    "no config": (lambda folder: (folder / CONFIG).unlink(), rf"adapter: .*no {CONFIG}"),
    "no JSON": (lambda folder: (folder / CONFIG).write_text("{"), CONFIG),
    "a key twice": (lambda folder: (folder / CONFIG).write_text('{"r": 1, "r": 2}'), CONFIG),
    "another kind": (options(peft_type="IA3"), f"{CONFIG}: peft_type is 'IA3'"),
    "no rank": (options(r=None), f"{CONFIG}: r is None; it must be a positive integer"),
    "a rank that is true": (options(r=True), f"{CONFIG}: r is True"),
    "a huge rank": (options(r=10**9), f"{CONFIG}: says r = 1000000000, but the factors in {TENSORS} have 4"),
    "a huge rank of one layer": (options(rank_pattern={"q_proj": 10**9}), f"{CONFIG}: says r = 1000000000"),
    "dropout of all": (options(lora_dropout=1.0), f"{CONFIG}: lora_dropout is 1.0"),
    "a scale that is no number": (options(lora_alpha="8"), f"{CONFIG}: lora_alpha is '8'"),
    "targets that are numbers": (options(target_modules=[1]), f"{CONFIG}: target_modules is"),
    "no pattern": (options(target_modules="(q_proj"), f"{CONFIG}: .* is no regular expression"),
    "an unknown task": (options(task_type="CHAT"), f"{CONFIG}: task_type is 'CHAT'"),
    "DoRA with dropout": (
        options(use_dora=True),
        rf"{CONFIG}: LoraConfig\(use_dora=True, lora_dropout=0.1\) has no rule",
    ),
    "initial values of the weights": (options(init_lora_weights="pissa"), f"{CONFIG}: .*init_lora_weights='pissa'"),
    "an option of a later version": (options(use_next=[1]), rf"{CONFIG}: use_next is \[1\]"),
    "a pickle": (pickled, f"no {TENSORS}; adapter_model.bin is a pickle, which may run code, and isn't read"),
    "a link": (link, f"{TENSORS}: is a link that leads out"),
    "no tensors": (lambda folder: (folder / TENSORS).write_bytes(b"x" * 7), TENSORS),
    "a truncated file": (
        lambda folder: (folder / TENSORS).write_bytes((folder / TENSORS).read_bytes()[:-8]),
        TENSORS,
    ),
    "no factors": (tensors(dict.clear), TENSORS),
    "integers": (tensors(lambda state: state.update({FACTOR: state[FACTOR].long()})), f"{TENSORS}: .*torch.int64"),
    "another name": (tensors(lambda state: state.update(x=torch.zeros(1))), f"{TENSORS}: 'x' is no tensor"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_is_named_before_peft_reads_it(causal, tmp_path, damage):
    folder = shutil.copytree(causal[1], tmp_path / "adapter")
    check_adapter_folder(folder)
    change, message = DAMAGES[damage]
    change(folder)
    with pytest.raises(CuboidError, match=f"(?s){message}"):
        check_adapter_folder(folder)


MISFITS = {
    "a tensor too few": (tensors(lambda state: state.pop(FACTOR)), f"{TENSORS}: has no {FACTOR}"),
    "a tensor too many": (
        tensors(lambda state: state.update({FACTOR.replace("q_proj", "k_proj"): state[FACTOR].clone()})),
        f"{TENSORS}: has .*k_proj.lora_A.weight, but the config beside it makes no such tensor",
    ),
    "another size": (tensors(lambda state: state.update({FACTOR: state[FACTOR][:, 1:].contiguous()})), "size mismatch"),
    "no layer": (options(target_modules=["c_attn"]), "doesn't fit LlamaForCausalLM"),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_an_adapter_of_another_model_is_named(pool, causal, tmp_path, misfit):
    folder = shutil.copytree(causal[1], tmp_path / "adapter")
    change, message = MISFITS[misfit]
    change(folder)
    plan = Plan(causal[0], batch=4, adapter=str(folder))
    with pytest.raises(CuboidError, match=f"(?s){folder}.*{message}"):
        verify(plan, config_of("1x2x1"), passes=("core",), pool=pool, timeout_s=TIMEOUT_S)


def test_the_command_takes_an_adapter_of_a_checkpoint_alone(causal):
    result = CliRunner().invoke(commands, ["verify", "--arch", "llama", "--mesh", "1x1x1", "--adapter", causal[1]])
    assert result.exit_code == 2
    assert "--adapter goes with --model" in result.output
