"""Checkpoints of real engines: loading them with plain transformers, and resuming training on any layout."""

import dataclasses
import json
import math
import threading
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import cuboid
from comparing import stored
from cuboid.checkpoint.exchange import Exchange
from cuboid.checkpoint.format.folder import resolve
from cuboid.checkpoint.format.manifest import Manifest
from cuboid.checkpoint.format.state_file import read_state
from cuboid.checkpoint.saver import Saver
from cuboid.checkpoint.snapshot import HostCopies
from cuboid.verify import SmallModel
from training import NO_DROPOUT, make_engine, ranks_of, settings, train

#: Steps before the save, and after it; in the sweep more, so that differences would show.
BEFORE, AFTER, LONG_AFTER = 3, 3, 20
LLAMA = SmallModel("llama", heads=8, kv_heads=4, layers=3)
TIED = SmallModel("qwen3", heads=8, kv_heads=4, layers=3)
FUSED = SmallModel("gpt2", heads=8, kv_heads=8, layers=3)
EXPERTS = SmallModel("mixtral", heads=4, kv_heads=2, layers=3)
MORE_EXPERTS = SmallModel("qwen3_moe", heads=4, kv_heads=2, layers=3)
NAMES = {
    LLAMA: "llama",
    TIED: "qwen3, tied",
    FUSED: "gpt2, fused",
    MORE_EXPERTS: "qwen3_moe, experts",
    EXPERTS: "mixtral, experts",
}


def overrides_of(small):
    return NO_DROPOUT if small.architecture == "gpt2" else {}


def train_and_save(path, config, out, overrides, after=AFTER):
    """Losses after the save, and everything that was saved as full tensors."""
    engine = make_engine(path, config, **overrides)
    train(engine, BEFORE)
    client = {"epoch": 2, "best": (1.5, [None, True]), "mask": torch.arange(3), "data_fingerprint": "abc"}
    assert engine.save_checkpoint(out, client_state=client)
    weights = cuboid.full_state_dict(engine)
    return train(engine, after, skip=BEFORE), {name: x.clone() for name, x in weights.items()}


def resume(path, config, out, overrides, steps=AFTER):
    """Losses after resuming."""
    engine = make_engine(path, config, **overrides)
    torch.manual_seed(99)
    where, client = engine.load_checkpoint(out)
    assert Path(where).name == f"global_step{BEFORE}"
    assert engine.global_steps == BEFORE
    assert client["epoch"] == 2
    assert client["best"] == (1.5, [None, True])
    assert client["mask"].tolist() == [0, 1, 2]
    return train(engine, steps, skip=BEFORE)


@pytest.fixture(scope="module")
def saved(pool, checkpoint, tmp_path_factory):
    """A checkpoint of each model, written once: by four ranks, and in the sweep by eight."""
    written = {}

    def of(small, after=AFTER):
        if (small, after) not in written:
            out = tmp_path_factory.mktemp("saved")
            config = settings("2x1x1" if after == AFTER else "2x2x1", stages=2)
            job = (checkpoint(small), config, str(out), overrides_of(small), after)
            losses, weights = pool.run(ranks_of(config), train_and_save, *job)[0]
            written[small, after] = out, config, ranks_of(config), losses, weights
        return written[small, after]

    return of


@pytest.mark.sample(1)
@pytest.mark.parametrize("small", NAMES, ids=NAMES.values())
def test_plain_transformers_loads_a_checkpoint_bit_for_bit(saved, small, tmp_path):
    out, _, _, _, weights = saved(small)
    folder = out / f"global_step{BEFORE}"
    model = AutoModelForCausalLM.from_pretrained(folder)
    state = model.state_dict()
    assert state.keys() == weights.keys()
    assert all(torch.equal(state[name], weights[name]) for name in weights)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    ours = stored(folder)
    # The names are the same as in a checkpoint that transformers writes.
    model.save_pretrained(tmp_path)
    theirs = stored(tmp_path)
    assert theirs.keys() == ours.keys() == index["weight_map"].keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in ours.values())
    assert index["metadata"]["total_parameters"] == model.num_parameters()


@pytest.mark.sample(1, ci=1)
@pytest.mark.parametrize("small", NAMES, ids=NAMES.values())
def test_optimizer_state_is_complete_by_parameter_name(saved, small):
    out, _, _, _, _ = saved(small)
    folder = out / f"global_step{BEFORE}"
    model = AutoModelForCausalLM.from_pretrained(folder)
    shapes = {name: x.shape for name, x in model.named_parameters()}
    for quantity in ("exp_avg", "exp_avg_sq"):
        tensors = stored(folder / "optimizer" / quantity)
        assert {name: x.shape for name, x in tensors.items()} == shapes
        assert all(x.any() for x in tensors.values())
    assert not list(out.rglob("*.pt")) + list(out.rglob("*.bin"))
    assert (out / "latest").read_text() == f"global_step{BEFORE}"


@pytest.mark.sample(1)
@pytest.mark.parametrize("small", NAMES, ids=NAMES.values())
def test_the_same_layout_resumes_bit_for_bit(pool, checkpoint, saved, small):
    out, config, ranks, losses, _ = saved(small)
    assert pool.run(ranks, resume, checkpoint(small), config, str(out), overrides_of(small))[0] == losses


OTHERS = {
    "1×2×2": (settings("1x2x2"), 1),
    "4×1×1, ZeRO 0": (settings("4x1x1", zero=0), 1),
    "3 stages × 1×1×2": (settings("1x1x2", stages=3), 1),
    "1×1×1, 4 replicas, ZeRO 2": (settings(data=4, zero=2), 4),
}


def goes_on_alike(pool, checkpoint, saved, small, layout, after=AFTER):
    out, _, _, losses, _ = saved(small, after)
    config, data = OTHERS[layout]
    job = (checkpoint(small), config, str(out), overrides_of(small), after)
    others = pool.run(ranks_of(config, data), resume, *job)[0]
    assert others == pytest.approx(losses, rel=1e-6)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("small", "layout"),
    list(zip([LLAMA, TIED, FUSED, LLAMA], OTHERS, strict=True)),
    ids=["llama", "tied", "fused", "llama, replicas"],
)
def test_another_layout_resumes_with_the_same_losses(pool, checkpoint, saved, small, layout):
    goes_on_alike(pool, checkpoint, saved, small, layout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", OTHERS)
@pytest.mark.parametrize("small", NAMES, ids=NAMES.values())
def test_every_model_resumes_with_the_same_losses_on_every_layout(pool, checkpoint, saved, small, layout):
    goes_on_alike(pool, checkpoint, saved, small, layout, LONG_AFTER)


@pytest.mark.sample(1)
@pytest.mark.parametrize("small", NAMES, ids=NAMES.values())
def test_one_process_resumes_with_the_same_losses(alone, checkpoint, saved, small):
    out, _, _, losses, _ = saved(small)
    others = alone.run(1, resume, checkpoint(small), settings(), str(out), overrides_of(small))[0]
    assert others == pytest.approx(losses, rel=1e-6)


# --- precision -----------------------------------------------------------------------------------------------------


@pytest.mark.ci
def test_bf16_keeps_its_master_weights(pool, alone, checkpoint, tmp_path):
    """Four replicas share the master weights; one process then resumes with them, in bf16 and in fp32."""
    path = checkpoint(LLAMA)
    config = settings("1x1x2", data=2, bf16=True)
    losses, weights = pool.run(4, train_and_save, path, config, str(tmp_path), {}, 4)[0]
    folder = tmp_path / f"global_step{BEFORE}"
    masters = stored(folder / "optimizer" / "master")
    assert all(weights[name].dtype == torch.bfloat16 for name in weights)
    assert all(torch.equal(masters[name].bfloat16(), weights[name]) for name in weights)
    assert not all(torch.equal(masters[name], weights[name].float()) for name in weights)
    assert pool.run(4, resume, path, config, str(tmp_path), {}, 4)[0] == losses
    wide = pool.run(2, loaded_weights, path, settings("1x2x1"), str(tmp_path))[0]
    assert all(torch.equal(wide[name], masters[name]) for name in masters)
    again = alone.run(1, resume, path, settings(bf16=True), str(tmp_path), {}, 4)[0]
    assert again == pytest.approx(losses, rel=5e-3)


def loaded_weights(path, config, out):
    engine = make_engine(path, config)
    engine.load_checkpoint(out)
    return {name: x.clone() for name, x in cuboid.full_state_dict(engine).items()}


def test_bf16_gets_its_master_weights_from_fp32_weights(pool, checkpoint, tmp_path):
    path = checkpoint(LLAMA)
    pool.run(2, train_and_save, path, settings("1x1x2"), str(tmp_path), {}, 0)
    masters = pool.run(
        4, masters_after_loading, path, settings("1x1x2", data=2, bf16=True), str(tmp_path), str(tmp_path)
    )
    before, after = masters[0]
    assert all(torch.equal(before[name], after[name]) for name in before)


def masters_after_loading(path, config, out, _):
    engine = make_engine(path, config)
    engine.load_checkpoint(out)
    engine.save_checkpoint(out, tag="again")
    return stored(Path(out) / f"global_step{BEFORE}"), stored(Path(out) / "again" / "optimizer" / "master")


# --- random numbers ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_dropout_resumes_bit_for_bit(pool, checkpoint, tmp_path):
    path, config = checkpoint(FUSED), settings("1x1x2", data=2)
    losses, _ = pool.run(4, train_and_save, path, config, str(tmp_path), {}, 4)[0]
    assert pool.run(4, resume, path, config, str(tmp_path), {}, 4)[0] == losses


# --- weights only --------------------------------------------------------------------------------------------------


def fine_tune(path, config, folder):
    """The engine's progress after it loaded only the weights, and whether these equal the checkpoint's."""
    engine = make_engine(path, config)
    _, client = engine.load_checkpoint(folder, load_module_only=True)
    read = stored(Path(folder) if (Path(folder) / "config.json").exists() else Path(folder) / f"global_step{BEFORE}")
    weights = cuboid.full_state_dict(engine)
    alike = all(torch.equal(weights[name], read[name]) for name in weights)
    return alike, engine.global_steps, engine.lr_scheduler.last_batch_iteration, client, train(engine, 2)


def test_loading_only_the_weights_for_fine_tuning(pool, checkpoint, saved):
    out, *_ = saved(LLAMA)
    # Before the first step, DeepSpeed's schedules are at step -1 or 0.
    alike, steps, iteration, client, losses = pool.run(2, fine_tune, checkpoint(LLAMA), settings("1x2x1"), str(out))[0]
    assert alike
    assert (steps, iteration <= 0, client["epoch"]) == (0, True, 2)
    # Any Hugging Face checkpoint can be loaded.
    other = checkpoint(dataclasses.replace(LLAMA, seed=5))
    alike, steps, _, client, others = pool.run(2, fine_tune, checkpoint(LLAMA), settings("1x2x1"), other)[0]
    assert alike
    assert (steps, client) == (0, {})
    assert others != losses


# --- settings ------------------------------------------------------------------------------------------------------


def save_often(path, config, out):
    engine = make_engine(path, config)
    states = []
    for _ in range(4):
        train(engine, 1)
        states.append({name: x.clone() for name, x in cuboid.full_state_dict(engine).items()})
        engine.save_checkpoint(out)
        # Changes the weights, which the background save must have copied by now.
        train(engine, 1)
    assert engine.wait_for_checkpoint()
    return states


@pytest.mark.sample(1)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_keep_last_keeps_the_newest(pool, checkpoint, tmp_path, asynchronous):
    config = settings("1x1x1", stages=2, keep_last=2, asynchronous=asynchronous, max_file_bytes=60_000)
    states = pool.run(2, save_often, checkpoint(LLAMA), config, str(tmp_path))[0]
    assert {path.name for path in tmp_path.iterdir()} == {"global_step5", "global_step7", "latest"}
    for state, tag in zip(states[2:], ("global_step5", "global_step7"), strict=True):
        read = stored(tmp_path / tag)
        assert all(torch.equal(state[name], read[name]) for name in read)
    # Files are at most 60 kB, unless a single tensor is larger.
    files = list((tmp_path / "global_step7").glob("model-*.safetensors"))
    assert len(files) > 4
    index = json.loads((tmp_path / "global_step7" / "model.safetensors.index.json").read_text())
    assert {file.name for file in files} == set(index["weight_map"].values())


def save_while_saving(path, config, out):
    """Save a model while an older checkpoint of it is written in the background, more slowly on one of the ranks.

    Returns:
        The weights of both.
    """
    engine = make_engine(path, config)
    train(engine, 1)
    send_and_receive, main_has_begun = Exchange._round, threading.Event()

    def delayed(*args):
        if threading.current_thread() is threading.main_thread():
            main_has_begun.set()
        elif engine.global_rank == 1:
            # Once: a save that waits for the background's end never begins beside it.
            main_has_begun.wait(2)
            main_has_begun.set()
        return send_and_receive(*args)

    Exchange._round = delayed
    try:
        first = {name: x.clone() for name, x in cuboid.full_state_dict(engine).items()}
        engine.save_checkpoint(f"{out}/checkpoints")
        train(engine, 3)
        cuboid.save_pretrained(engine, f"{out}/model")
        assert engine.wait_for_checkpoint()
    finally:
        Exchange._round = send_and_receive
    return first, cuboid.full_state_dict(engine)


@pytest.mark.ci
def test_a_model_can_be_saved_while_a_checkpoint_is_being_written(pool, checkpoint, tmp_path):
    config = settings("1x1x2", asynchronous=True)
    saved = pool.run(2, save_while_saving, checkpoint(LLAMA), config, str(tmp_path), timeout_s=60)[0]
    assert not torch.equal(*(weights["model.norm.weight"] for weights in saved))
    for weights, folder in zip(saved, ("checkpoints/global_step1", "model"), strict=True):
        read = stored(tmp_path / folder)
        assert all(torch.equal(weights[name], read[name]) for name in read)


def fail_to_copy(path, config, out):
    """The error of a background save whose copy to host memory fails on one rank; training goes on after it."""
    engine = make_engine(path, config)
    train(engine, 1)
    copy = HostCopies.copy

    def without_memory(*args, **kwargs):
        raise MemoryError("no host memory is left")

    if engine.global_rank == 1:
        HostCopies.copy = without_memory
    try:
        engine.save_checkpoint(out)
    except cuboid.CheckpointError as error:
        message = str(error)
    finally:
        HostCopies.copy = copy
    assert all(map(math.isfinite, train(engine, 1)))
    assert engine.save_checkpoint(out)
    assert engine.wait_for_checkpoint()
    return message


def test_a_copy_for_the_background_that_fails_on_one_rank_is_an_error_on_all(pool, checkpoint, tmp_path):
    config = settings("1x1x2", asynchronous=True)
    messages = pool.run(2, fail_to_copy, checkpoint(LLAMA), config, str(tmp_path), timeout_s=60)
    assert all("no host memory is left" in message for message in messages)
    assert resume_step(tmp_path) == 2


def resume_step(root):
    """The step of the checkpoint that would be resumed from."""
    return Manifest.read(resolve(root)).step


def change_what_is_being_saved(path, config, out):
    """Save twice at the same step: at once, and in the background, which begins only after more steps and changes."""
    engine = make_engine(path, config)
    train(engine, 2)
    client = {"seen": [1], "best": {"loss": torch.tensor(0.5)}, "table": np.zeros(2), "pair": (1, [2])}
    settings_ = engine.checkpointing._saver._settings
    engine.checkpointing._saver._settings = settings_.model_copy(update={"asynchronous": False})
    engine.save_checkpoint(f"{out}/at_once", client_state=client)
    engine.checkpointing._saver._settings = settings_
    write, may_write = Saver._write, threading.Event()

    def write_later(*args):
        may_write.wait(60)
        return write(*args)

    Saver._write = write_later
    try:
        engine.save_checkpoint(f"{out}/later", client_state=client)
        client["seen"].append(2)
        client["best"]["loss"].add_(1)
        client["table"] += 1
        client["pair"][1].append(3)
        train(engine, 2)
        may_write.set()
        assert engine.wait_for_checkpoint()
    finally:
        Saver._write = write


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize("zero", [0, 1])
def test_a_background_save_holds_what_was_true_when_it_was_asked_for(pool, checkpoint, tmp_path, zero):
    config = {**settings("1x2x1", asynchronous=True), "zero_optimization": {"stage": zero}}
    pool.run(2, change_what_is_being_saved, checkpoint(LLAMA), config, str(tmp_path))
    at_once, later = (
        read_state(tmp_path / name / "global_step2", Manifest.read(tmp_path / name / "global_step2"))
        for name in ("at_once", "later")
    )
    for key in ("steps", "scheduler", "optimizer"):
        assert str(later[key]) == str(at_once[key])
    assert later["client"]["seen"] == [1]
    assert later["client"]["best"]["loss"] == 0.5
    assert later["client"]["table"].tolist() == [0, 0]
    assert later["client"]["pair"] == (1, [2])


# --- memory --------------------------------------------------------------------------------------------------------

#: Size of the largest tensor.
LARGEST_BYTES = 64 << 20


def memory_of_saving(path, config, out):
    """Growth of this rank's resident set during its second save, and the model's size, in bytes."""
    engine = make_engine(path, config)
    train(engine, 1)
    process, peak, done = psutil.Process(), [0], threading.Event()
    engine.save_checkpoint(f"{out}/first")

    def watch():
        while not done.wait(0.001):
            peak[0] = max(peak[0], process.memory_info().rss)

    before = process.memory_info().rss
    watcher = threading.Thread(target=watch)
    watcher.start()
    engine.save_checkpoint(f"{out}/second")
    done.set()
    watcher.join()
    return peak[0] - before, sum(x.nbytes for x in cuboid.full_state_dict(engine).values())


@pytest.mark.ci
def test_a_rank_has_at_most_two_full_tensors_in_memory(pool, tmp_path):
    config = LlamaConfig(
        vocab_size=LARGEST_BYTES // 4 // 1024,
        hidden_size=1024,
        intermediate_size=1024,
        num_hidden_layers=1,
        num_attention_heads=8,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "start")
    grown = pool.run(2, memory_of_saving, str(tmp_path / "start"), settings("1x1x2"), str(tmp_path))
    # Weights and two moments.
    assert 3 * grown[0][1] > 6 * LARGEST_BYTES
    # Ten percent more for anything but tensors.
    assert max(growth for growth, _ in grown) <= 2.1 * LARGEST_BYTES


# --- lineage -------------------------------------------------------------------------------------------------------


@pytest.mark.ci
def test_lineage_goes_back_to_the_first_weights(pool, checkpoint, tmp_path):
    path, first, second = checkpoint(LLAMA), tmp_path / "first", tmp_path / "second"
    pool.run(2, train_and_save, path, settings("1x2x1"), str(first), {}, 0)
    pool.run(4, resume_and_save, path, settings("1x2x2"), str(first), str(second))
    documents = [read_state(path, Manifest.read(path)) for path in (first / "global_step3", second / "on")]
    assert [ancestor["path"] for ancestor in documents[0]["lineage"]] == [path]
    root, parent = documents[1]["lineage"]
    assert root == documents[0]["lineage"][0]
    assert (parent["id"], parent["step"], parent["data_fingerprint"]) == (documents[0]["id"], BEFORE, "abc")
    assert parent["layout"]["mesh"] == {"batch": 1, "sequence": 2, "hidden": 1}
    assert documents[1]["layout"]["mesh"] == {"batch": 1, "sequence": 2, "hidden": 2}
    # The lineage of a model that is loaded from a checkpoint includes the checkpoint.
    pool.run(2, train_and_save, str(first / "global_step3"), settings("1x2x1"), str(tmp_path / "third"), {}, 0)
    last = tmp_path / "third" / "global_step3"
    third = read_state(last, Manifest.read(last))["lineage"]
    assert [ancestor["id"] for ancestor in third] == [None, documents[0]["id"]]


def resume_and_save(path, config, out, further):
    engine = make_engine(path, config)
    engine.load_checkpoint(out)
    train(engine, 1)
    engine.save_checkpoint(further, tag="on")
