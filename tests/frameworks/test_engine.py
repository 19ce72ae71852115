"""DeepSpeed's own features around a sharded model: loader, scheduler, monitor, parameter groups, its checkpoints."""

import csv

import pytest

from launching import reports_of

SCRIPT = """
    import json, sys
    import cuboid
    import deepspeed, torch
    from torch.utils.data import TensorDataset
    from transformers import AutoModelForCausalLM, HfArgumentParser, LlamaConfig
    from transformers.integrations import HfDeepSpeedConfig

    out = sys.argv[1]
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 2},
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear"}},
        "csv_monitor": {"enabled": True, "output_path": out, "job_name": "monitor"},
        "tensor_parallel": {"mode": "3d_tensor", "mesh": {"batch": 1, "sequence": 2, "hidden": 1}},
    }
    torch.manual_seed(0)
    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4)
    model = AutoModelForCausalLM.from_config(LlamaConfig(num_key_value_heads=4, **sizes))
    ids = torch.randint(0, 64, (16, 12))
    # Groups of the whole parameters, made before the model was sharded.
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    engine, optimizer, loader, scheduler = deepspeed.initialize(
        model=model, model_parameters=groups, config=config, training_data=TensorDataset(ids)
    )
    mesh = cuboid.mesh_of(engine)
    report = {"rows": [], "lr": [], "losses": [], "groups": [g["weight_decay"] for g in optimizer.param_groups]}
    for (rows,) in loader:
        report["rows"].append(rows[:, 0].tolist())
        loss = engine(input_ids=rows, labels=rows).loss
        engine.backward(loss)
        engine.step()
        report["losses"].append(loss.item())
        report["lr"].append(engine.get_lr()[0])
    report["norm"] = float(engine.get_global_grad_norm())
    report["batch"] = engine.train_batch_size()
    report["dtype"] = str(next(engine.module.parameters()).dtype)
    engine.save_checkpoint(out + "/checkpoint")
    before = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    with torch.no_grad():
        for p in engine.module.parameters():
            p.zero_()
    engine.load_checkpoint(out + "/checkpoint")
    report["resumed"] = all(torch.equal(p, before[name]) for name, p in engine.module.named_parameters())
    report["data"] = mesh.coordinate.data
    # Without a cache, and with one, for which the model's own settings ask.
    kinds = ({"use_cache": False}, {})
    found = [engine.module.eval().generate(ids[:2], max_new_tokens=2, do_sample=False, **each) for each in kinds]
    report["generated"] = [tokens.tolist() for tokens in found]

    # The other doors: a config that is kept alive, and a model in memory on a mesh that the config chooses.
    cuboid.save_pretrained(engine, out + "/saved")
    alive = HfDeepSpeedConfig(config)
    report["alive"] = str(cuboid.mesh_of(AutoModelForCausalLM.from_pretrained(out + "/saved")).shape)
    del alive
    report["gone"] = type(AutoModelForCausalLM.from_pretrained(out + "/saved")).__mro__[1].__name__
    print("RESULT" + json.dumps(report), flush=True)
    # A rank that leaves first would take the others' connections along.
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
"""


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    root = tmp_path_factory.mktemp("engine")
    return root, reports_of(4, SCRIPT, root)


def test_the_data_loader_gives_each_replica_its_share(reports):
    _, by_rank = reports
    assert len(by_rank) == 4
    shares = {}
    for report in by_rank:
        assert shares.setdefault(report["data"], report["rows"]) == report["rows"]
    assert shares.keys() == {0, 1}
    assert shares[0] != shares[1]
    assert all(report["batch"] == 4 for report in by_rank)


def test_training_goes_on_alike_on_all_ranks(reports):
    _, by_rank = reports
    for report in by_rank:
        assert report["dtype"] == "torch.bfloat16"
        assert report["groups"] == [0.1, 0.0]
        assert report["lr"] == pytest.approx([0, 0.0025, 0.005, 0.0075], abs=1e-6)
        same_data = next(other for other in by_rank if other["data"] == report["data"])
        assert report["losses"] == same_data["losses"]
        assert report["norm"] == by_rank[0]["norm"] > 0


def test_the_monitor_writes_what_it_writes(reports):
    root, by_rank = reports
    (path,) = root.glob("monitor/*lr.csv")
    with path.open() as file:
        rows = list(csv.reader(file))[1:]
    # DeepSpeed counts samples: two rows for each of two replicas a step.
    assert [int(row[0]) for row in rows] == [4, 8, 12, 16]
    assert [float(row[1]) for row in rows] == pytest.approx(by_rank[0]["lr"], abs=1e-6)


def test_deepspeed_resumes_its_own_checkpoint_on_the_same_layout(reports):
    assert all(report["resumed"] for report in reports[1])


def test_generation_works_with_and_without_a_cache(reports):
    for report in reports[1]:
        without, by_default = report["generated"]
        assert without == by_default
        assert [len(row) for row in without] == [14, 14]


def test_a_config_that_is_kept_alive_shards_what_is_loaded(reports):
    for report in reports[1]:
        assert report["alive"] == "1×2×1"
        assert report["gone"] == "LlamaPreTrainedModel"
