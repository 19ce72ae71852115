"""Code that comes with a model runs where it is asked for, and nowhere else; nobody is asked on the terminal."""

import builtins
import json
import sys
import textwrap

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

import cuboid
from cuboid import CheckpointError
from cuboid.cli import app
from cuboid.verify import SmallModel
from cuboid.weights.model_folder import model_config

_CODE = """
    from pathlib import Path
    from transformers import LlamaConfig

    Path({marker!r}).touch()

    class OwnConfig(LlamaConfig):
        model_type = "own_code_of_a_model"

    class OwnTokenizer:
        pass
"""
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "tensor_parallel": {"mode": "3d_tensor", "mesh": {"batch": 1, "sequence": 1, "hidden": 1}},
}
REFUSED = "needs code that comes with the model, which isn't run unless you trust it"


@pytest.fixture
def own_code(tmp_path, monkeypatch):
    """A model's folder whose config and tokenizer have their own code; it leaves ``tmp_path / "ran"`` if it is run."""
    folder = tmp_path / "model"
    SmallModel("llama", heads=4, kv_heads=2, layers=2).write(folder)
    settings = json.loads((folder / "config.json").read_text())
    settings |= {"model_type": "own_code_of_a_model", "auto_map": {"AutoConfig": "own.OwnConfig"}}
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "own.py").write_text(textwrap.dedent(_CODE).format(marker=str(tmp_path / "ran")))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]}})
    )
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "text").write_text("one\ntwo\n" * 50)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(builtins, "input", lambda *_: pytest.fail("asks on the terminal"))
    return folder


COMMANDS = {
    "prepare": "--out out --model model --data text",
    "train": "--out out --model model --data text --config config.json --steps 1",
    "train from scratch": "--out out --arch-config model --tokenizer model --data text --config config.json --steps 1",
    "bench": "--model model --config config.json",
    "verify": "--model model --mesh 1x1x1",
    "estimate": "--model model --config config.json --cluster 1x1xH100-80GB --seq-len 64",
    "plan": "--model model --cluster 1x1xH100-80GB --seq-len 64 --global-batch 4",
    "timeline": "--stages 2 --micro-batches 2 --model model --seq-len 64",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_refuses_a_models_own_code_in_a_sentence(own_code, tmp_path, command, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["cuboid", command.split()[0], *COMMANDS[command].split()])
    with pytest.raises(SystemExit) as ended:
        app()
    said = capsys.readouterr().err
    assert ended.value.code == 1, said
    assert REFUSED in said
    assert "--trust-remote-code" in said
    assert not (tmp_path / "ran").exists()


def test_trusted_code_is_run(own_code, tmp_path, monkeypatch, capsys):
    assert model_config(own_code, trust_remote_code=True).model_type == "own_code_of_a_model"
    assert (tmp_path / "ran").exists()
    (tmp_path / "ran").unlink()
    for name in list(sys.modules):
        if name.startswith("transformers_modules"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.chdir(tmp_path)
    arguments = [*COMMANDS["prepare"].split(), "--trust-remote-code"]
    monkeypatch.setattr(sys, "argv", ["cuboid", "prepare", *arguments])
    with pytest.raises(SystemExit):
        app()  # its tokenizer is none
    assert (tmp_path / "ran").exists()
    assert REFUSED not in capsys.readouterr().err


def test_a_script_is_not_asked_either(own_code, tmp_path):
    with pytest.raises(CheckpointError, match=REFUSED):
        cuboid.from_pretrained(own_code, CONFIG)
    with pytest.raises(CheckpointError, match=REFUSED):
        cuboid.from_pretrained(own_code, CONFIG, auto_class=AutoModelForCausalLM, trust_remote_code=None)
    with cuboid.scope(CONFIG), pytest.raises(CheckpointError, match=REFUSED):
        AutoModelForCausalLM.from_pretrained(own_code)
    config = AutoConfig.for_model("t5")
    config.auto_map = {"AutoModelForCausalLM": "own.OwnModel"}
    with pytest.raises(CheckpointError, match=REFUSED):
        cuboid.from_config(config, CONFIG, auto_class=AutoModelForCausalLM)
    assert not (tmp_path / "ran").exists()
