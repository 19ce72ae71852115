"""ColossalAI's own launcher and plugins, and what the plugin says of a config."""

import json
import re

import pytest
import torch
from torch.utils.data import TensorDataset

import cuboid
from cuboid.errors import ConfigError, MeshError
from cuboid.verify import SmallModel
from launching import BIN, ROOT, free_port, reports_of, run, torchrun

pytest.importorskip("colossalai", reason="ColossalAI isn't installed: `make colossalai` does it, or tells why it can't")

MESH = {"mode": "3d_tensor", "mesh": {"batch": 2}}
EXAMPLE = ROOT / "docs" / "examples" / "booster.py"


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A small model with a tokenizer, and a text."""
    from cuboid.data.initial_model import train_tokenizer, write_llama

    folder = tmp_path_factory.mktemp("start")
    text = (ROOT / "docs" / "pipeline.md").read_text(encoding="utf-8") * 5
    (folder / "text.txt").write_text(text, encoding="utf-8")
    tokenizer = train_tokenizer([text], 512)
    write_llama(folder / "model", 512, tokenizer, 0)
    return folder


@pytest.mark.slow
def test_the_example_runs_under_colossalai_run_and_goes_on_under_torchrun_on_fewer_ranks(start, tmp_path):
    arguments = (EXAMPLE, start / "model", start / "text.txt", tmp_path / "out")
    launcher = (BIN / "colossalai", "run", "--nproc_per_node", 4, "--master_port", free_port())
    path = f"{BIN}:/usr/local/bin:/usr/bin:/bin"
    status, output = run(*launcher, *arguments, timeout_s=400, PATH=path)
    assert status == 0, output
    losses = [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", output)]
    assert len(losses) == 20
    assert losses[-1] < losses[0]
    (tmp_path / "less.yaml").write_text(
        "train_micro_batch_size_per_gpu: 8\n"
        "tensor_parallel: {mode: 3d_tensor, mesh: {sequence: 2}}\n"
        "pipeline: {engine: seq1f1b, stages: 1, segments: 2}\n"
    )
    launcher = (BIN / "torchrun", "--nproc-per-node", 2, "--master-port", free_port())
    status, output = run(*launcher, *arguments, tmp_path / "less.yaml", timeout_s=400, PATH=path)
    assert status == 0, output
    assert "step 21: loss" in output
    assert "step 40: loss" in output
    status, output = run(BIN / "python", ROOT / "docs" / "examples" / "evaluate.py", tmp_path / "out", timeout_s=400)
    assert status == 0, output


@pytest.mark.slow
def test_colossalais_own_plugin_trains_as_without_cuboid(tmp_path):
    def reports(first_line):
        script = f"""
            {first_line}
            import gc
            import json
            import colossalai, torch
            from colossalai.booster import Booster
            from colossalai.booster.plugin import TorchDDPPlugin
            from transformers import LlamaConfig, LlamaForCausalLM

            colossalai.launch_from_torch(seed=5, verbose=False)
            sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, vocab_size=61)
            model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4))
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            booster = Booster(plugin=TorchDDPPlugin())
            model, optimizer, _, _, _ = booster.boost(model, optimizer)
            losses = []
            for step in range(3):
                ids = torch.arange(24).view(2, 12) * (step + 2 + torch.distributed.get_rank()) % 61
                loss = model(input_ids=ids, labels=ids).loss
                booster.backward(loss, optimizer)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            print("RESULT" + json.dumps(losses))
            # torch's wrapper keeps the group's threads, which may abort the interpreter as it ends.
            del model, optimizer, booster, loss
            gc.collect()
            torch.distributed.destroy_process_group()
        """
        return sorted(reports_of(2, script, tmp_path, launch=torchrun))

    assert reports("import cuboid; cuboid.CuboidPlugin") == reports("")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"tensor_parallel": MESH, "optimizer": {"type": "AdamW"}}, "give the optimizer to booster.boost"),
        ({"tensor_parallel": MESH, "scheduler": {}}, "as lr_scheduler"),
        ({"tensor_parallel": MESH, "fp16": {"enabled": True}}, '"bf16": {"enabled": true}'),
        ({"tensor_parallel": MESH, "train_batch_size": 8}, "follows from the data loader"),
        ({"tensor_parallel": MESH, "gradient_cliping": 1.0}, 'did you mean "gradient_clipping"?'),
        ({"tensor_parallel": MESH, "steps_per_print": 1}, "known keys: activation_checkpointing, bf16, checkpoint"),
        (
            {"tensor_parallel": MESH, "zero_optimization": {"stage": 2}},
            "optimization.stage: Input should be 0 or 1",
        ),
        ({"tensor_parallel": MESH, "gradient_clipping": -1}, "greater than or equal to 0"),
        ({"tensor_parallel": MESH, "train_micro_batch_size_per_gpu": 3}, "which mesh.batch = 2 ranks share"),
        ({"tensor_parallel": {**MESH, "size": 3}}, 'leave "size" out'),
        ({"bf16": {"enabled": True}}, "the config has no key of Cuboid's"),
    ],
)
def test_a_config_that_means_nothing_is_refused_before_anything_starts(monkeypatch, config, message):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match=re.escape(message)):
        cuboid.CuboidPlugin(config)


def test_a_mesh_that_does_not_divide_the_world_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(MeshError, match="doesn't divide the world of 3"):
        cuboid.CuboidPlugin({"tensor_parallel": MESH})


def loaded_rows(config):
    """What the loader gives this rank in two epochs, and what the plugin says of its place."""
    plugin = cuboid.CuboidPlugin(config)
    loader = plugin.prepare_dataloader(TensorDataset(torch.arange(12)), 2, shuffle=True, drop_last=True)
    rows = []
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        rows.append([row for (batch,) in loader for row in batch.tolist()])
    stages = plugin.stage_manager
    place = (stages.stage, stages.is_first_stage(), stages.is_last_stage(ignore_chunk=True), plugin.coordinate.data)
    return rows, place, (plugin.pp_size, plugin.tp_size, plugin.dp_size)


def test_replicas_get_shares_of_the_data_and_the_ranks_of_one_the_same(pool):
    config = {
        "tensor_parallel": {"mode": "3d_tensor", "mesh": "auto", "size": 2},
        "pipeline": {"engine": "seq1f1b", "stages": 2},
    }
    results = pool.run(8, loaded_rows, config)
    assert [place for _, place, _ in results] == [
        (stage, stage == 0, stage == 1, replica) for stage in (0, 1) for replica in (0, 1) for _ in range(2)
    ]
    assert {sizes for _, _, sizes in results} == {(2, 2, 2)}
    of_replica = {place[3]: rows for rows, place, _ in results}
    assert all(rows == of_replica[place[3]] for rows, place, _ in results)
    for epoch in (0, 1):
        assert sorted(of_replica[0][epoch] + of_replica[1][epoch]) == list(range(12))
    assert of_replica[0][0] != of_replica[0][1]


def groups_of(path, config):
    """Ranks of the plugin's process groups, before and after a model is boosted."""
    from colossalai.booster import Booster

    plugin = cuboid.CuboidPlugin(config)
    try:
        said = str(plugin.dp_group)
    except cuboid.CuboidError as error:
        said = str(error)
    Booster(plugin=plugin).boost(cuboid.from_pretrained(path, plugin.config))
    ranks = torch.distributed.get_process_group_ranks
    return said, ranks(plugin.tp_group), ranks(plugin.dp_group), ranks(plugin.pp_group)


def test_process_groups_go_by_colossalais_names(pool, checkpoint):
    path = checkpoint(SmallModel("llama", heads=8, kv_heads=4, layers=2))
    config = {
        "tensor_parallel": {"mode": "3d_tensor", "mesh": {"hidden": 2}},
        "pipeline": {"engine": "seq1f1b", "stages": 2},
    }
    said, *groups = pool.run(8, groups_of, path, config)[3]
    assert "once booster.boost has been called" in said
    assert groups == [[2, 3], [1, 3], [3, 7]]


def test_the_configs_of_the_repository_are_valid(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    for path in (ROOT / "configs").glob("colossalai_*.yaml"):
        assert json.dumps(cuboid.CuboidPlugin(path).config.model_dump(mode="json"))
