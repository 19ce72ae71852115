"""All architectures that are right on a mesh are read in slices as plain transformers reads them whole."""

import copy
import sys

import pytest
import torch

import cuboid
from conftest import TIMEOUT_S
from cuboid.models.certification.mesh_certificates import mesh_verdict
from cuboid.models.certification.small_config import small_config
from cuboid.tensor3d.sharding.sharding_spec import take_shard
from cuboid.weights.state_dict_map import sharding_specs
from launching import ROOT

sys.path.insert(0, str(ROOT / "docs"))

from generators.architectures import causal_cases, config_of, head_cases, head_of

#: Tensors are joined when they are read: experts, convolutions. RWKV's code makes new values even for what was read.
CONVERTED = [(name, "") for name in ("olmo_hybrid", "kimi_linear", "mixtral", "ernie4_5_moe", "rwkv")]


def accepted(case):
    """Class and small config of an architecture, for causal language models or another task; None if it isn't right."""
    try:
        cls, config = config_of(*case) if case[1] == "" else head_of(case)
        is_right = "whole rows" not in mesh_verdict(cls, config).refused
    except Exception:  # rejected, or transformers' own defaults make no model
        return None
    return (cls, small_config(config)) if is_right else None


def all_accepted():
    """Of all model types, and of some for other tasks, by a name that can be a folder's."""
    cases = [*(case for case in causal_cases() if case[1] == ""), *head_cases()]
    known_cases = {"-".join(case).replace(" ", "_"): known for case in cases if (known := accepted(case))}
    assert len(known_cases) >= 200
    return known_cases


def wrong_slices(folders, axes):
    """The parameters of each checkpoint whose slices aren't those of what plain transformers reads."""
    section = {"tensor_parallel": {"mode": "3d_tensor", "mesh": axes}}
    wrong = {}
    for name, (folder, cls) in folders.items():
        full = dict(cls.from_pretrained(folder, dtype=torch.float32).named_parameters())
        try:
            with cuboid.scope(section):
                model = cls.from_pretrained(folder, dtype=torch.float32)
        except Exception as error:  # all ranks raise it, and go on with the next one
            wrong[name] = [f"{type(error).__name__}: {error}"]
            continue
        specs, mesh = sharding_specs(model), cuboid.mesh_of(model)
        local = dict(model.named_parameters())
        assert local.keys() == full.keys()
        wrong[name] = [n for n, x in local.items() if not torch.equal(x, take_shard(full[n], specs[n], mesh))]
    return wrong


def other_new_weights(configs, axes):
    """The tensors of each new model that aren't slices of what a single rank makes with the same seed.

    On a single rank, those that don't depend on the seed must be what plain transformers makes, the others as large.
    """
    wrong = {}
    for name, (cls, config) in configs.items():
        models = []
        for mesh in ({"batch": 1, "sequence": 1, "hidden": 1}, axes):
            torch.manual_seed(0)
            try:
                with cuboid.scope({"tensor_parallel": {"mode": "3d_tensor", "mesh": mesh}}):
                    models.append(cls._from_config(copy.deepcopy(config), dtype=torch.float32))
            except Exception as error:
                wrong[name] = [f"{type(error).__name__}: {error}"]
                break
        else:
            full, specs = dict(models[0].named_parameters()), sharding_specs(models[1])
            mesh = cuboid.mesh_of(models[1])
            pairs = [(n, x, take_shard(full[n], specs[n], mesh)) for n, x in models[1].named_parameters()]
            wrong[name] = [n for n, x, expected in pairs if not torch.equal(x, expected)]
            wrong[name] += unlike(models[0], [plain_model(cls, config, seed) for seed in (0, 1)])
    return wrong


def plain_model(cls, config, seed):
    torch.manual_seed(seed)
    return cls._from_config(copy.deepcopy(config), dtype=torch.float32)


def unlike(model, plain):
    """The tensors of a model that differ from those of two plain ones by more than the seed explains."""
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    others = [dict([*other.named_parameters(), *other.named_buffers()]) for other in plain]
    assert tensors.keys() == others[0].keys()
    differing = []
    for name, x in tensors.items():
        first, second = others[0][name], others[1][name]
        if torch.equal(first, second):
            is_alike = torch.equal(x, first)
        else:
            is_alike = x.numel() < 1000 or abs(float(x.std() / first.std()) - 1) < 0.15
        if not is_alike:
            differing.append(f"{name} in value")
    return differing


@pytest.mark.slow
def test_new_weights_of_all_are_the_same_on_a_mesh(pool):
    for by_model in pool.run(
        4, other_new_weights, all_accepted(), {"sequence": 2, "hidden": 2}, timeout_s=6 * TIMEOUT_S
    ):
        wrong = {name: reasons for name, reasons in by_model.items() if reasons}
        assert not wrong, "\n".join(f"{name}: {reasons}" for name, reasons in wrong.items())


@pytest.mark.sample(0, ci=1)
@pytest.mark.parametrize("axes", [{"sequence": 2, "hidden": 2}, {"batch": 2, "sequence": 2}], ids=str)
@pytest.mark.parametrize("cases", [CONVERTED, pytest.param(None, marks=pytest.mark.slow)], ids=["converted", "all"])
def test_slices_are_those_of_the_whole(pool, tmp_path, cases, axes):
    configs = {case[0]: accepted(case) for case in cases} if cases else all_accepted()
    folders = {}
    for name, (cls, config) in configs.items():
        torch.manual_seed(0)
        cls._from_config(config, dtype=torch.float32).save_pretrained(tmp_path / name)
        folders[name] = str(tmp_path / name), cls
    for by_checkpoint in pool.run(4, wrong_slices, folders, axes, timeout_s=TIMEOUT_S if cases else 6 * TIMEOUT_S):
        wrong = {name: reasons for name, reasons in by_checkpoint.items() if reasons}
        assert not wrong, "\n".join(f"{name}: {reasons}" for name, reasons in wrong.items())
