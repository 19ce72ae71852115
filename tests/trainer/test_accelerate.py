"""accelerate's own objects on a mesh with replicas: what they count is replicas, where they would count ranks."""

import contextlib
import os

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import (
    DataLoaderConfiguration,
    DeepSpeedPlugin,
    DummyOptim,
    DummyScheduler,
    broadcast,
    broadcast_object_list,
    gather,
    gather_object,
    set_seed,
)
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig

import cuboid
from cuboid.errors import CuboidError

ROWS, BATCH, LENGTH = 16, 2, 8


def config_of(mesh, **others):
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "train_batch_size": "auto",
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "tensor_parallel": {"mode": "3d_tensor", "mesh": mesh},
        **others,
    }


@contextlib.contextmanager
def accelerator_of(config, **options):
    """As a script of a launcher makes it; neither what others have left in the process nor what it leaves counts."""
    kept = dict(os.environ)
    _reset_states()
    try:
        plugin = DeepSpeedPlugin(hf_ds_config=config)
        yield Accelerator(deepspeed_plugin=plugin, **options)
    finally:
        _reset_states()
        os.environ.clear()
        os.environ.update(kept)


def _reset_states():
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def fresh_model():
    torch.manual_seed(0)
    sizes = {"vocab_size": 48, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    return AutoModelForCausalLM.from_config(LlamaConfig(num_attention_heads=4, num_key_value_heads=4, **sizes)).train()


def rows():
    ids = torch.randint(0, 48, (ROWS, LENGTH), generator=torch.Generator().manual_seed(5))
    return [{"input_ids": row, "labels": row, "number": torch.tensor(at)} for at, row in enumerate(ids)]


def decay(optimizer):
    """To zero at the end of a loader of one process."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / (ROWS // BATCH)))


def alone(replicas, split):
    """The rates and the weights of one process whose batches are those of all replicas together."""
    model = fresh_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = decay(optimizer)
    batch = BATCH if split else BATCH * replicas
    rates = []
    for batched in DataLoader(rows(), batch_size=batch):
        rates.append(optimizer.param_groups[0]["lr"])
        model(input_ids=batched["input_ids"], labels=batched["labels"]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for _ in range(1 if split else replicas):
            schedule.step()
    return rates, model.state_dict()


def script(config, split, folder, **options):
    """A training script; what it saw on this rank."""
    loading = DataLoaderConfiguration(split_batches=split)
    with accelerator_of(config, dataloader_config=loading, **options) as accelerator:
        model = fresh_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loader = DataLoader(rows(), batch_size=BATCH)
        model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, decay(optimizer))
        seen = {"length": len(loader), "rates": [], "numbers": [], "objects": [], "rows": [], "data": 0}
        for batch in loader:
            numbers = batch.pop("number")
            seen["rows"].append(numbers.tolist())
            seen["rates"].append(optimizer.param_groups[0]["lr"])
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            seen["numbers"] += accelerator.gather_for_metrics(numbers).tolist()
            seen["objects"] += accelerator.gather_for_metrics([f"row {at}" for at in numbers.tolist()])
        mesh = cuboid.mesh_of(model)
        seen["data"] = mesh.coordinate.data
        seen["micro"] = model.train_micro_batch_size_per_gpu()
        seen["sum"] = int(accelerator.reduce(torch.tensor(mesh.coordinate.data + 1)))
        seen["mean"] = float(accelerator.reduce(torch.tensor(mesh.coordinate.data + 1.0), "mean"))
        seen["float sum"] = float(accelerator.reduce(torch.tensor(mesh.coordinate.data + 1.0)))
        # The sum of both replicas fits into float16; that of all four ranks wouldn't.
        seen["half sum"] = float(accelerator.reduce(torch.tensor(20000.0, dtype=torch.float16)))
        seen["counts"] = said_by(lambda: accelerator.reduce(torch.tensor(mesh.rank)))
        if torch.distributed.get_rank() == 1:
            accelerator.set_trigger()
        seen["triggered"] = [accelerator.check_trigger(), accelerator.check_trigger()]
        seen["asked"] = answers(accelerator)
        seen["norm"] = float(accelerator.clip_grad_norm_(model.parameters(), 1.0))
        seen["world"] = accelerator.num_processes
        state = accelerator.get_state_dict(model)
        accelerator.save_state(folder)
        before, rate = cuboid.full_state_dict(model), schedule.get_last_lr()
        with torch.no_grad():
            for parameter in accelerator.unwrap_model(model).parameters():
                parameter.zero_()
        schedule.step()
        # Over the first one, as scripts that keep the best do.
        accelerator.load_state(folder)
        accelerator.save_state(folder)
        after = cuboid.full_state_dict(model)
        seen["resumed"] = schedule.get_last_lr() == rate and all(torch.equal(after[n], before[n]) for n in before)
        off = 0.0
        if state:
            _, wanted = alone(mesh.topology.data, split)
            off = max(float((state[name] - tensor).abs().max()) for name, tensor in wanted.items())
        return {**seen, "off": off}


def answers(accelerator):
    """What accelerate says about data, and about ranks, and what it gathers, sends and splits."""
    rank, process = torch.distributed.get_rank(), accelerator.process_index
    ranks = torch.distributed.get_world_size()
    sent = [process]
    broadcast_object_list(sent, from_process=1)
    with accelerator.split_between_processes(list(range(5))) as split:
        shares = accelerator.gather_for_metrics(split, use_gather_object=True)
    with PartialState().split_between_processes({"rows": list(range(5))}, apply_padding=True) as padded:
        pass
    set_seed(7, device_specific=True)
    mains = [None] * ranks
    torch.distributed.all_gather_object(mains, (accelerator.is_main_process, accelerator.is_last_process))
    return {
        "process": process,
        "ranks": (PartialState().process_index == rank, PartialState().num_processes == ranks, mains),
        "gathered": gather({"own": torch.tensor([process, 10 + process])})["own"].tolist(),
        "scalars": accelerator.gather(torch.tensor(process)).tolist(),
        "objects": gather_object([f"of {process}"]),
        "sent": (int(broadcast(torch.tensor(process), from_process=1)), sent),
        "padded to": accelerator.pad_across_processes(torch.ones(1 + process)).tolist(),
        "shares": (split, shares, padded["rows"]),
        "seed": torch.initial_seed(),
    }


def said_by(call):
    try:
        call()
    except (CuboidError, RuntimeError) as error:
        return str(error)
    return ""


def test_automatic_values_of_cuboids_sections_are_left_to_it(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    sections = {"pipeline": {"engine": "seq1f1b", "stages": 2, "segments": "auto", "schedule": "auto"}}
    config = config_of("auto", **sections)
    config["tensor_parallel"]["size"] = 2
    plugin = DeepSpeedPlugin(hf_ds_config=config)
    numbers = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
    plugin.deepspeed_config_process(must_match=False, **dict.fromkeys(numbers, 4))
    assert plugin.deepspeed_config["train_batch_size"] == 4
    assert plugin.deepspeed_config["tensor_parallel"]["mesh"] == "auto"
    assert plugin.deepspeed_config["pipeline"] == sections["pipeline"]


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize("split", [False, True], ids=["batches", "split batches"])
def test_a_script_of_accelerates_counts_replicas(pool, tmp_path, split):
    replicas = 2
    rates, _ = alone(replicas, split)
    config = config_of({"hidden": 2})
    if split:
        config = config_of("auto", cluster="1x4xH100-80GB")
        config["tensor_parallel"]["size"] = 2
    results = pool.run(4, script, config, split, str(tmp_path))
    for seen in results:
        assert seen["world"] == replicas
        assert seen["length"] == len(rates)
        assert seen["rates"] == pytest.approx(rates)
        assert seen["rows"] == next(other["rows"] for other in results if other["data"] == seen["data"])
        assert sorted(seen["numbers"]) == list(range(ROWS))
        assert sorted(seen["objects"]) == sorted(f"row {at}" for at in range(ROWS))
        assert seen["micro"] == (BATCH // replicas if split else BATCH)
        assert (seen["sum"], seen["float sum"], seen["mean"]) == (3, 3.0, 1.5)
        assert seen["half sum"] == 40000.0
        assert "different whole numbers" in seen["counts"]
        assert seen["triggered"] == [True, False]
        check_answers(seen["asked"], seen["data"])
        assert seen["norm"] > 0
        assert seen["resumed"]
        assert seen["off"] < 2e-5


def check_answers(asked, data):
    assert asked["process"] == data
    assert asked["ranks"] == (True, True, [(True, False), (False, False), (False, False), (False, True)])
    assert asked["gathered"] == [0, 10, 1, 11]
    assert asked["scalars"] == [0, 1]
    assert asked["objects"] == ["of 0", "of 1"]
    assert asked["sent"] == (1, [1])
    assert asked["padded to"] == ([1.0, 0.0] if data == 0 else [1.0, 1.0])
    assert asked["shares"] == (
        [0, 1, 2] if data == 0 else [3, 4],
        [0, 1, 2, 3, 4],
        [0, 1, 2] if data == 0 else [3, 4, 4],
    )
    assert asked["seed"] == 7 + data


def schedule_of_the_config(config, split):
    """The rates of a schedule in the config, whose length is of a loader in one process; without a GPU or with none."""
    results = []
    loading = DataLoaderConfiguration(split_batches=split)
    for options in ({}, {"cpu": True}):
        with accelerator_of(config, dataloader_config=loading, **options) as accelerator:
            model = fresh_model()
            optimizer = DummyOptim(model.parameters(), lr=1e-2)
            schedule = DummyScheduler(optimizer, total_num_steps=ROWS // BATCH, warmup_num_steps=1)
            loader = DataLoader(rows(), batch_size=BATCH)
            model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
            rates = []
            for batch in loader:
                batch.pop("number")
                rates.append(model.get_lr()[0])
                accelerator.backward(model(**batch).loss)
                optimizer.step()
                schedule.step()
            results.append((cuboid.mesh_of(model).shape.size, [*rates, model.get_lr()[0]]))
    return results


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize("split", [False, True], ids=["batches", "split batches"])
def test_a_schedule_in_the_config_ends_with_the_loader_also_on_the_cpu(pool, split):
    sections = {
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"total_num_steps": "auto", "warmup_num_steps": "auto", "warmup_max_lr": "auto"},
        },
    }
    sections["scheduler"]["params"]["warmup_min_lr"] = "auto"
    for results in pool.run(2, schedule_of_the_config, config_of({"hidden": 2}, **sections), split):
        for size, rates in results:
            assert size == 2
            assert len(rates) == ROWS // BATCH + 1
            assert max(rates) == pytest.approx(1e-2)
            assert rates[-1] == pytest.approx(0, abs=2e-3)
            assert min(rates[2:-1]) > 0


def with_a_schedule_of_another(config):
    with accelerator_of(config) as accelerator:
        model = fresh_model()
        optimizer, other = (torch.optim.AdamW(model.parameters()) for _ in range(2))
        loader = DataLoader(rows(), batch_size=BATCH)
        return said_by(lambda: accelerator.prepare(model, optimizer, loader, decay(other)))


def test_a_schedule_of_another_optimizer_is_refused(pool):
    for said in pool.run(2, with_a_schedule_of_another, config_of({"hidden": 2})):
        assert "LambdaLR is of another optimizer" in said


def with_groups(config, *empty):
    """Losses, and the rates of all groups, of steps with an optimizer that may have empty groups."""
    with accelerator_of(config) as accelerator:
        model = fresh_model()
        optimizer = torch.optim.AdamW([{"params": list(model.parameters())}, *empty], lr=1e-2)
        loader = DataLoader(rows(), batch_size=BATCH)
        model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, decay(optimizer))
        losses, rates = [], []
        for batch in loader:
            batch.pop("number")
            losses.append(model(**batch).loss)
            rates.append([group["lr"] for group in optimizer.param_groups])
            accelerator.backward(losses[-1])
            optimizer.step()
            schedule.step()
        return [float(loss) for loss in losses], rates


def test_an_empty_group_under_a_schedule_makes_no_difference(pool):
    config = config_of({"hidden": 2})
    # As scripts make them that part the parameters by names which this model hasn't.
    empty = {"params": [], "weight_decay": 0.0}
    ranks = [pool.run(2, with_groups, config, *groups) for groups in ((), (empty,))]
    for without, with_one in zip(*ranks, strict=True):
        assert with_one[0] == without[0]
        assert with_one[1] == [rates * 2 for rates in without[1]]


def test_the_cpu_is_refused_where_deepspeed_has_another_device(monkeypatch):
    monkeypatch.setattr(
        "cuboid_patches.accelerate.get_accelerator", lambda: type("", (), {"device_name": lambda _: "cuda"})()
    )
    with pytest.raises(CuboidError, match="DS_ACCELERATOR=cpu"), accelerator_of(config_of({"hidden": 1}), cpu=True):
        pass
