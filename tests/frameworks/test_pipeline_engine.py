"""The pipeline engine, as users of DeepSpeed's ``PipelineEngine`` know it, and what happens when something fails."""

import csv
import json
import textwrap

import pytest

from launching import as_ranks, reports_of

SCRIPT = """
    import json, sys
    import cuboid
    import deepspeed, torch
    from torch.utils.data import Dataset
    from transformers import AutoModelForCausalLM, LlamaConfig

    out = sys.argv[1]
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 1},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear"}},
        "csv_monitor": {"enabled": True, "output_path": out, "job_name": "monitor"},
        "pipeline": {
            "engine": "seq1f1b", "stages": 2, "segments": 3, "partition": "measured", "trace": out + "/trace",
            "trace_step": 2,
        },
    }
    torch.manual_seed(0)
    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4)
    model = AutoModelForCausalLM.from_config(LlamaConfig(num_key_value_heads=2, tie_word_embeddings=True, **sizes))
    ids = torch.randint(0, 64, (16, 24))

    class Rows(Dataset):
        def __len__(self):
            return len(ids)

        def __getitem__(self, index):
            return {"input_ids": ids[index], "labels": ids[index]}

    # Groups of the whole model's parameters, made before it was cut.
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model, model_parameters=groups, config=config, training_data=Rows()
    )
    mesh = cuboid.mesh_of(engine)
    own = sum(p.numel() for p in engine.module.parameters())
    report = {
        "stage": engine.stage_id, "data": mesh.coordinate.data, "stages": engine.num_stages, "parameters": own,
        "groups": [group["weight_decay"] for group in optimizer.param_groups],
        "ends": [engine.is_first_stage(), engine.is_last_stage()], "batch": engine.train_batch_size(),
        "losses": [], "lr": [], "norms": [], "cuts": [],
    }

    # From the training data, which starts over by itself: two steps are an epoch.
    for step in range(4):
        if step == 3:
            # In the middle of an epoch.
            engine.save_checkpoint(out + "/middle")
        report["cuts"].append(engine.pipeline.segment_lengths(24, 2))
        report["losses"].append(engine.train_batch().item())
        report["lr"].append(engine.get_lr()[0])
        report["norms"].append(float(engine.get_global_grad_norm()))
    report["cuts"].append(engine.pipeline.segment_lengths(24, 2))
    report["boundary"] = engine.is_gradient_accumulation_boundary()

    # Batches of several lengths, in every form; only the first rank of a replica reads.
    def batches():
        yield {"input_ids": ids[:2, :17], "labels": ids[:2, :17]}
        yield ids[:2], ids[:2]
        yield {"input_ids": ids[:2, :2], "attention_mask": torch.ones(2, 2)}, ids[:2, :2].float()
        yield {"input_ids": ids[:1, :9].tolist(), "labels": ids[:1, :9].tolist()}

    engine.set_train_batch_size(8 * 2)
    report["micro_batches"] = engine.micro_batches
    reader = mesh.rank == mesh.copy_ranks[0]
    source = batches() if reader else None
    try:
        engine.train_batch(source)
    except cuboid.CuboidError as error:
        report["float labels"] = [str(error), error.rank]
    short = [{"input_ids": ids[:2, :n], "labels": ids[:2, :n]} for n in (17, 24, 2, 9)]
    report["losses"].append(engine.train_batch(iter(short) if reader else None).item())
    # Without updates in between, evaluation says the same of the same data in whatever micro-batches.
    whole = engine.eval_batch(iter([{"input_ids": ids[:4], "labels": ids[:4]}]), num_micro_batches=1).item()
    halves = [{"input_ids": ids[i : i + 2], "labels": ids[i : i + 2]} for i in (0, 2)]
    report["eval"] = [whole, engine.eval_batch(iter(halves), num_micro_batches=2).item()]

    report["errors"] = {}
    for name, call in {
        "ended": lambda: engine.train_batch(iter(short[:3])),
        "labels": lambda: engine.eval_batch(iter([{"input_ids": ids[:2]}]), num_micro_batches=1),
        "key": lambda: engine.eval_batch(iter([{"input_ids": ids[:2], "pixels": ids[:2]}]), num_micro_batches=1),
        "shape": lambda: engine.eval_batch(iter([(ids[:2], ids[:2, :5])]), num_micro_batches=1),
        "none": lambda: engine.eval_batch(None, num_micro_batches=1),
        "loader": lambda: engine.train_batch(torch.utils.data.DataLoader(short, batch_size=None)),
        "reading": lambda: engine.eval_batch((1 // 0 for _ in range(2)), num_micro_batches=1),
        "logits": lambda: engine.eval_batch(iter(short), return_logits=True),
        "forward": lambda: engine(input_ids=ids),
        "module": lambda: engine.module(input_ids=ids),
        "backward": lambda: engine.backward(torch.ones(())),
        "step": lambda: engine.step(),
    }.items():
        try:
            call()
        except Exception as error:
            report["errors"][name] = f"{type(error).__name__}: {error}"
    report["losses"].append(engine.train_batch(iter(short) if reader else None).item())
    engine.save_checkpoint(out + "/checkpoint")
    cuboid.save_pretrained(engine, out + "/saved")
    if mesh.rank == 0:
        plain = AutoModelForCausalLM.from_pretrained(out + "/saved").eval()
        report["plain"] = plain(input_ids=ids[:4], labels=ids[:4]).loss.item()
    last = engine.eval_batch(iter([{"input_ids": ids[:4], "labels": ids[:4]}]), num_micro_batches=1)
    report["saved"] = last.item()
    engine.set_train_batch_size(4 * 2)
    engine.load_checkpoint(out + "/middle")
    report["again"] = engine.train_batch().item()
    print("RESULT" + json.dumps(report), flush=True)
    # A rank that leaves first would take the others' connections along.
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
"""


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    root = tmp_path_factory.mktemp("pipeline")
    by_rank = reports_of(4, SCRIPT, root)
    assert len(by_rank) == 4
    return root, by_rank


def test_stages_share_the_layers_and_both_ends_have_the_tied_embedding(reports):
    _, by_rank = reports
    assert {(report["stage"], report["data"]) for report in by_rank} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    embedding, norm, layer = 64 * 32, 32, 32 * (32 + 32 + 16 + 16) + 3 * 32 * 64 + 2 * 32
    by_stage = {report["stage"]: report["parameters"] for report in by_rank}
    assert sum(by_stage.values()) == 3 * layer + 2 * embedding + norm
    assert {(report["stage"], *report["ends"]) for report in by_rank} == {(0, True, False), (1, False, True)}
    assert all(report["batch"] == 8 and report["stages"] == 2 for report in by_rank)
    assert all(report["groups"] == [0.1, 0.0] for report in by_rank)


def test_all_ranks_train_alike(reports):
    _, by_rank = reports
    for report in by_rank:
        assert report["losses"] == by_rank[0]["losses"]
        assert report["norms"] == by_rank[0]["norms"]
        assert report["lr"] == pytest.approx([0, 0.0025, 0.005, 0.0075], abs=1e-6)
        assert report["boundary"] is False
        assert report["micro_batches"] == 4
    # The learning rate is 0 at first. Each epoch has the same two batches.
    assert by_rank[0]["losses"][2] == by_rank[0]["losses"][0]
    assert by_rank[0]["losses"][3] < by_rank[0]["losses"][1]


def test_the_measured_cut_takes_effect_and_the_stages_of_a_replica_agree(reports):
    _, by_rank = reports
    first, last = (
        {report["data"]: report["cuts"] for report in by_rank if report["stage"] == stage} for stage in (0, 1)
    )
    # Each replica measures its own times, so two of them may cut differently.
    assert first == last
    for cuts in first.values():
        assert all(sum(cut) == 24 and len(cut) == 3 for cut in cuts)
        assert cuts[0] == cuts[1], "the first step only warms up"


def test_evaluation_is_the_mean_over_tokens(reports):
    for report in reports[1]:
        assert report["eval"][0] == pytest.approx(report["eval"][1], rel=1e-6)


def test_mistakes_are_told_on_every_rank_and_training_goes_on(reports):
    for report in reports[1]:
        errors = report["errors"]
        assert report["float labels"][0].startswith("labels holds torch.float32")
        assert report["float labels"][1] == report["data"], "the rank that reads"
        assert errors["ended"].startswith("StopIteration")
        assert "needs labels" in errors["labels"]
        assert "pixels has no rule" in errors["key"]
        assert "labels is [2, 5], but input_ids is [2, 24]" in errors["shape"]
        assert "was given no iterator" in errors["none"]
        assert "a DataLoader isn't an iterator" in errors["loader"]
        assert "by zero" in errors["reading"]
        assert "never has the logits" in errors["logits"]
        assert "use train_batch or eval_batch" in errors["forward"]
        assert "the engine's train_batch" in errors["module"]
        assert "use train_batch" in errors["backward"]
        assert "makes the optimizer step itself" in errors["step"]


def test_what_is_saved_opens_in_plain_transformers(reports):
    _, by_rank = reports
    first = next(report for report in by_rank if "plain" in report)
    assert first["plain"] == pytest.approx(first["saved"], rel=1e-6)


def test_a_resumed_engine_reads_its_data_on_from_where_it_was(reports):
    for report in reports[1]:
        # The sequences are cut by measured times, which are others by now.
        assert report["again"] == pytest.approx(report["losses"][3], rel=1e-6)
        assert report["again"] != pytest.approx(report["losses"][2], rel=1e-3)


def test_the_monitor_has_loss_and_learning_rate(reports):
    root, by_rank = reports
    for name in ("lr", "train_loss"):
        (path,) = root.glob(f"monitor/*{name}.csv")
        with path.open() as file:
            rows = list(csv.reader(file))[1:]
        assert [int(row[0]) for row in rows[:4]] == [8, 16, 24, 32]
        if name == "train_loss":
            assert [float(row[1]) for row in rows[:4]] == pytest.approx(by_rank[0]["losses"][:4], rel=1e-6)


def test_the_trace_holds_every_unit_of_every_stage_on_one_clock(reports):
    root, _ = reports
    assert (root / "trace" / "step_2.png").stat().st_size > 10_000
    trace = json.loads((root / "trace" / "step_2.json").read_text())
    events = {event["name"]: event for event in trace["traceEvents"] if event["ph"] == "X"}
    units = [(micro_batch, segment) for micro_batch in range(2) for segment in range(3)]
    assert events.keys() == {f"{op}{stage}.{m}.{s}" for op in "FB" for stage in range(2) for m, s in units}
    # Their clocks are compared by messages, so only to a precision, which the trace tells.
    error_us = trace["otherData"]["clock_error_us"]
    assert error_us > 0
    for m, s in units:
        sent = events[f"F0.{m}.{s}"]["ts"] + events[f"F0.{m}.{s}"]["dur"]
        assert events[f"F1.{m}.{s}"]["ts"] > sent - error_us
        sent = events[f"B1.{m}.{s}"]["ts"] + events[f"B1.{m}.{s}"]["dur"]
        assert events[f"B0.{m}.{s}"]["ts"] > sent - error_us
    assert 0 < trace["otherData"]["bubble"] < 1
    assert 0 < trace["otherData"]["simulated_bubble"] < 1


FAILURE = """
    import os, sys
    import cuboid, deepspeed, torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4)
    config = {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4,
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
        "pipeline": {"engine": "seq1f1b", "stages": int(os.environ["WORLD_SIZE"]), "segments": 2},
    }
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(num_key_value_heads=4, **sizes))
    engine, *_ = deepspeed.initialize(model=model, config=config)
    ids = torch.randint(0, 64, (1, 16))
    batches = iter([{"input_ids": ids, "labels": ids}] * 100)
    engine.train_batch(batches)
    print("trained", flush=True)
    calls = 0

    def fail(*_):
        global calls
        calls += 1
        if calls == 3:
            if sys.argv[1] == "raise":
                raise ValueError("the third unit is one too many")
            print("gone without a word", flush=True)
            os._exit(1)

    if engine.stage_id == 1:
        layer = engine.module.model.layers[-1 if engine.is_last_stage() else 2]
        layer.register_forward_pre_hook(cuboid.local_hook(fail))
    engine.train_batch(batches)
    print("never printed", flush=True)
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize("way", ["raise", "die"])
def test_a_rank_that_fails_ends_the_job_with_its_message_first(tmp_path, way):
    script = tmp_path / "failure.py"
    script.write_text(textwrap.dedent(FAILURE))
    results = as_ranks(3, script, way)
    outputs = [output for _, output in results]
    assert all(status != 0 for status, _ in results), outputs
    assert all("trained" in output and "never printed" not in output for output in outputs), outputs
    if way == "raise":
        assert "ValueError: the third unit is one too many" in outputs[1]
        assert "in F1." in outputs[1]
        assert "on rank 1" in outputs[1]
    # The others say the same, or name the rank that is gone, in a line and after a while, for its own message to come
    # first.
    told = "ValueError: the third unit is one too many" if way == "raise" else "rank 1 ended while rank"
    for rank in (0, 2):
        assert f"cuboid: rank {rank}, for rank 1: " in outputs[rank], outputs[rank]
        assert told in outputs[rank], outputs[rank]
        assert "Traceback" not in outputs[rank], outputs[rank]


REFUSED = """
    import sys
    import cuboid, deepspeed, torch
    import transformers
    from transformers import AutoModelForCausalLM

    kind, stages, segments = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "pipeline": {"engine": "seq1f1b", "stages": stages, "segments": segments},
    }
    sizes = dict(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    if kind == "bert":
        model = transformers.BertForMaskedLM(transformers.BertConfig(intermediate_size=64, **sizes))
    elif kind == "t5":
        small = transformers.T5Config(d_model=32, d_ff=64, num_layers=1, vocab_size=64)
        model = transformers.T5ForConditionalGeneration(small)
    else:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(intermediate_size=64, **sizes))
    try:
        deepspeed.initialize(model=model, config=config)
    except cuboid.CuboidError as error:
        assert not torch.distributed.is_initialized()
        print("REFUSED", error, flush=True)
"""


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("kind", "stages", "message"),
    [
        ("llama", 2, "pipeline.stages is 2, but the model has 1 layers"),
        ("bert", 1, "positions see later ones"),
        ("t5", 1, "encoder"),
    ],
)
def test_models_that_cannot_be_cut_are_refused_before_there_is_a_process_group(tmp_path, kind, stages, message):
    script = tmp_path / "refused.py"
    script.write_text(textwrap.dedent(REFUSED))
    for status, output in as_ranks(stages, script, kind, stages, 2):
        assert status == 0, output
        (line,) = [line for line in output.splitlines() if line.startswith("REFUSED")]
        assert message in line
