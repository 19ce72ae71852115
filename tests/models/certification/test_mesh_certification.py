"""Architectures are accepted on a mesh because they were right there: ranks in threads, the probe, whole blocks."""

import json
import threading
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

import cuboid
from conftest import TIMEOUT_S
from cuboid.distributed.axis_collectives import all_gather, all_reduce, reduce_scatter
from cuboid.distributed.thread_ranks import ThreadRanks
from cuboid.distributed.topology import AXES, MeshShape
from cuboid.errors import CuboidError, UnsupportedModelError
from cuboid.models.architectures import roles
from cuboid.models.architectures.certificate import MeshVerdict
from cuboid.models.certification import certificates, mesh_certificates
from cuboid.models.certification.certificates import digest_of, entries_of, features_of
from cuboid.models.certification.mesh_certificates import mesh_verdict, read_verdict, written_verdict
from cuboid.models.certification.mesh_check import check_meshes
from cuboid.models.kinds.probe_rows import CannotProbe
from cuboid.tensor3d.layers.whole_block import LateSplit

SIZES = {"vocab_size": 67, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def cls_and_config(architecture, **options):
    config = AutoConfig.for_model(architecture, **options)
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config


# --- ranks in threads ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axes", [("sequence",), ("batch", "hidden"), AXES])
def test_collectives_of_threads_are_those_of_processes(axes):
    def talk(mesh):
        along = mesh.along(*axes)
        local = torch.arange(4.0) + 10 * mesh.rank
        parts = torch.arange(float(along.size)).unsqueeze(1) + mesh.rank
        largest = all_reduce(local.clone(), along, dist.ReduceOp.MAX)
        return local, all_gather(local, along), all_reduce(local.clone(), along), largest, reduce_scatter(parts, along)

    ranks = ThreadRanks(MeshShape(2, 3, 2))
    said = ranks.run(talk)
    for mesh in ranks.meshes:
        peers = next(peers for peers in mesh.topology.groups(axes) if mesh.rank in peers)
        stacked = torch.stack([said[rank][0] for rank in peers])
        _, gathered, summed, largest, scattered = said[mesh.rank]
        assert torch.equal(gathered, stacked)
        assert torch.equal(summed, stacked.sum(0))
        assert torch.equal(largest, stacked.amax(0))
        assert scattered.item() == len(peers) * peers.index(mesh.rank) + sum(peers)


def test_what_fails_on_one_thread_lets_the_others_go():
    ranks = ThreadRanks(MeshShape(1, 2, 2))

    def fail_on_one(mesh):
        if mesh.rank == 2:
            raise CuboidError("only here")
        all_reduce(torch.ones(1), mesh.along(*AXES))

    before = {*threading.enumerate()}
    with pytest.raises(CuboidError, match="only here"):
        ranks.run(fail_on_one)
    assert before.issuperset(threading.enumerate())
    assert ranks.run(lambda mesh: all_reduce(torch.ones(1), mesh.along(*AXES)).item()) == [4.0] * 4


def test_the_error_of_the_first_thread_to_fail_is_raised():
    ranks = ThreadRanks(MeshShape(1, 2, 2))

    def fail_on_two(mesh):
        if mesh.rank == 2:
            raise CuboidError("the cause")
        with suppress(Exception):
            all_reduce(torch.ones(1), mesh.along(*AXES))
        if mesh.rank == 1:
            raise KeyError("a consequence")

    with pytest.raises(CuboidError, match="the cause"):
        ranks.run(fail_on_two)


# --- the probe -------------------------------------------------------------------------------------------------------


def test_what_is_not_right_when_it_is_split_is_computed_whole(monkeypatch):
    # Two key/value heads, taken for as many as there are queries.
    monkeypatch.setitem(roles.HEADS, "k_proj", "query")
    verdict = check_meshes(*cls_and_config("llama", num_key_value_heads=8))
    assert verdict.whole_blocks == ("self_attn",)
    assert not verdict.splits_late
    assert verdict.error < 1e-12


@pytest.mark.ci
def test_a_recurrent_model_is_split_late_because_its_masks_are_cut_to_its_embeddings():
    verdict = check_meshes(*cls_and_config("mamba2"))
    assert verdict.splits_late
    assert not verdict.refused
    assert "whole" not in verdict.with_stages
    assert verdict.error < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("is_decoder", [True, False])
def test_attention_that_only_long_sequences_have_is_refused(is_decoder):
    cls, config = cls_and_config("big_bird", is_decoder=is_decoder)
    with pytest.raises(UnsupportedModelError, match='set attention_type to "original_full"'):
        mesh_verdict(cls, config)


def test_stages_behind_the_first_make_masks_of_the_whole_length(monkeypatch):
    monkeypatch.setattr(LateSplit, "whole_shape", lambda self, part: part.shape)
    verdict = check_meshes(*cls_and_config("mamba2"))
    assert "a tensor [6, 16] with a segment of 32 positions" in verdict.with_stages["whole"]


@pytest.mark.ci
def test_weights_that_stay_in_float32_are_compared_in_float64():
    verdict = check_meshes(*cls_and_config("ernie4_5_moe"))
    assert not verdict.refused
    assert verdict.error < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "gpt_neox", "opt", "bloom", "mamba", "mixtral", "bert", "gptj"])
def test_the_shipped_table_is_what_the_probe_finds(architecture):
    cls, config = cls_and_config(architecture)
    known = entries_of(mesh_certificates.MESH_TABLE)[digest_of(features_of(cls, config))]
    entry = written_verdict(check_meshes(cls, config))
    assert {**known, "error": 0} == {**entry, "error": 0}


def test_the_table_is_read_as_it_was_written():
    table = json.loads(mesh_certificates.MESH_TABLE.read_text(encoding="utf-8"))
    for entries in table["architectures"].values():
        for entry in entries.values():
            assert written_verdict(read_verdict(entry)) == entry
    entry = written_verdict(MeshVerdict(with_stages={"segments": "not"}))
    assert read_verdict(entry).with_stages == {"segments": "not"}
    unknown = [{**entry, "refused": {"x": "y"}}, {**entry, "with_stages": {"pieces": "not"}}, {**entry, "inputs": "x"}]
    for damage in (*unknown, {}, {"refused": {"x": "y"}, "whole": []}, [], None):
        with pytest.raises((KeyError, ValueError, TypeError)):
            read_verdict(damage)


@pytest.mark.parametrize("obstacle", [None, "it is too odd"])
def test_what_was_found_out_is_remembered(tmp_path, monkeypatch, obstacle):
    runs = []

    def probe(*_):
        runs.append(1)
        if obstacle is not None:
            raise CannotProbe(obstacle)
        return MeshVerdict({"packed sequences": "no"}, ("mlp",), splits_late=True, with_stages={"segments": "not"})

    def known():
        # As another process does.
        mesh_certificates._found.cache_clear()
        try:
            return mesh_verdict(*cls_and_config("llama"))
        except UnsupportedModelError as error:
            return str(error)

    monkeypatch.setattr(mesh_certificates, "check_meshes", probe)
    monkeypatch.setattr(certificates, "entries_of", lambda _: {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = known()
    assert known() == first
    if obstacle is None:
        assert first.with_stages == {"segments": "not"}
    else:
        assert first.startswith(f"LlamaForCausalLM can't be probed before its weights are read: {obstacle}")
    assert len(runs) == 1


# --- what comes of it ------------------------------------------------------------------------------------------------


def test_an_architecture_that_is_not_right_is_rejected_before_weights_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(mesh_certificates, "mesh_verdict", lambda *_: MeshVerdict({"whole rows": "the loss differs"}))
    AutoConfig.for_model("llama", **SIZES).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    mesh = {"tensor_parallel": {"mode": "3d_tensor", "mesh": {"batch": 1}}}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES, intermediate_size=32))
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM isn't right on a mesh: the loss differs"):
        cuboid.shard(model, mesh)
    assert not any(type(module).__module__.startswith("cuboid") for module in model.modules())


def trained(path, architecture, axes, batch):
    """Two steps of SGD on a mesh, from a checkpoint; the losses, shares of parameters, and what is saved."""
    section = {"tensor_parallel": {"mode": "3d_tensor", "mesh": axes}}
    model = cuboid.from_pretrained(path, section, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.save_pretrained(f"{path}-trained")
    return losses, sum(parameter.numel() for parameter in model.parameters()), model.num_parameters()


@pytest.mark.sample(0, ci=1)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("architecture", ["bloom", "mamba2", "bert"])
@pytest.mark.parametrize("axes", [{"sequence": 2, "hidden": 2}, {"batch": 2, "hidden": 2}])
def test_whole_blocks_train_as_on_one_process_from_slices(pool, tmp_path, architecture, axes, padded):
    options = {
        "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2},
        "bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    }
    torch.manual_seed(0)
    config = AutoConfig.for_model(architecture, **{**SIZES, **options.get(architecture, {})})
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float64).train()
    plain.save_pretrained(tmp_path / "model")
    ids = torch.randint(0, 67, (4, 15))
    batch = {"input_ids": ids, "labels": ids.clone()}
    if padded:
        mask = torch.ones_like(ids)
        mask[1, 9:] = 0
        mask[2, 14:] = 0
        batch = {**batch, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask}
    results = pool.run(4, trained, str(tmp_path / "model"), architecture, axes, batch, timeout_s=TIMEOUT_S)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(2):
        loss = plain(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        # Models that compute parts in float32 differ by its rounding.
        assert all(abs(losses[step] - loss.item()) < 1e-5 for losses, _, _ in results)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "model-trained", dtype=torch.float64)
    for (name, parameter), other in zip(plain.named_parameters(), saved.parameters(), strict=True):
        assert torch.allclose(parameter, other, atol=1e-5), name
    for _, held, total in results:
        assert held < 0.3 * total
