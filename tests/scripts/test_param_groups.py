"""Parameter groups that differ from stage to stage: training, schedules and resuming are those of one process."""

import contextlib
import functools
import re
from pathlib import Path
from types import SimpleNamespace

import deepspeed
import pytest
import torch
from torch.optim import lr_scheduler
from transformers import AutoModelForCausalLM

import cuboid
from cuboid.errors import CheckpointError, OptimizerError
from cuboid.optim.param_groups import AlignedGroups, _common_order, _stage, _unsure, _warn_of_order
from cuboid.optim.schedule_groups import regrouped
from cuboid.optim.setting_values import described
from cuboid.verify import SmallModel
from training import _batches, ranks_of, settings, train

TIMEOUT_S = 120.0
SMALL = SmallModel("llama", heads=4, kv_heads=2, layers=4)
TIED = SmallModel("llama", heads=4, kv_heads=2, layers=4, tied=True)
STEPS = 3
EVEN, UNEVEN = [2, 2], [3, 1]


def _layer(name):
    match = re.search(r"layers\.(\d+)\.", name)
    return int(match[1]) if match else None


def _kind(grouping, name):
    """The parameter group of a name: its key, and its options."""
    layer = _layer(name)
    if grouping == "head":
        return ("head", {"lr": 1e-3}) if "lm_head" in name else ("rest", {"lr": 1e-2})
    if grouping == "embedding":
        return ("embedding", {"lr": 1e-3}) if "embed" in name else ("rest", {"lr": 1e-2})
    if grouping == "three":
        kind = "embedding" if "embed" in name else "head" if "lm_head" in name else "body"
        return kind, {"lr": RATES[kind]}
    if grouping == "layer-wise":
        depth = 0 if "embed" in name else 5 if layer is None else layer + 1
        return str(depth), {"lr": 1e-2 * 0.8**depth}
    # Decay and no decay, as the Trainer's; by what is frozen they may be empty.
    return ("no decay", {"weight_decay": 0.0}) if "norm" in name else ("decay", {"weight_decay": 0.1})


def _trains(grouping, name):
    layer = _layer(name)
    return {
        "frozen lower": layer not in (0, 1) and "embed" not in name,
        "frozen upper": layer not in (2, 3) and "lm_head" not in name and name != "model.norm.weight",
        "frozen norms": "norm" not in name,
    }.get(grouping, True)


def _groups(model, grouping, *, keeps_empty=False):
    """The script's groups: without those of other stages; or with these, but without frozen parameters."""
    groups = {}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(_trains(grouping, name))
        kind, options = _kind(grouping, name)
        group = groups.setdefault(kind, {"params": [], **options})
        if parameter.requires_grad or not keeps_empty:
            group["params"].append(parameter)
    return list(groups.values())


RATES = {"embedding": 1e-3, "body": 1e-2, "head": 4e-3}


def _config(layers=None, mesh="1x1x1", *, zero=1, data=1, **options):
    stages = None if layers is None else len(layers)
    config = settings(mesh, stages, zero=zero, data=data, **options)
    if layers is not None:
        config["pipeline"]["stage_balance"] = layers
    # Tight enough that every step is clipped: a norm that misses a group would show.
    config["gradient_clipping"] = 0.3
    del config["scheduler"], config["optimizer"]
    return config


def _model(path, config):
    return cuboid.from_pretrained(path, config, dtype=torch.bfloat16 if "bf16" in config else torch.float32)


def trained_grouped(path, config, grouping, way):
    """Losses, the last norm, rates and weights of a run; the groups are given in one of several ways."""
    model = _model(path, config)
    if way == "parameters":
        config = {**config, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}}
        engine = deepspeed.initialize(model=model, model_parameters=_groups(model, grouping), config=config)[0]
    elif way == "callable":
        groups = _groups(model, grouping)
        engine = deepspeed.initialize(
            model=model,
            optimizer=lambda _: torch.optim.AdamW(groups, lr=1e-2),
            lr_scheduler=lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 1.0),
            config=config,
        )[0]
    elif way == "before":
        # Made of a whole model, from which the engine takes this rank's part.
        full_model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        optimizer = torch.optim.AdamW(_groups(full_model, grouping), lr=1e-2)
        engine = deepspeed.initialize(model=full_model, optimizer=optimizer, config=config)[0]
    else:
        groups = _groups(model, grouping, keeps_empty=way == "with empty")
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        # Stepped by the script or by a Trainer; here not at all.
        schedule = lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
        assert len(schedule.base_lrs) == len(optimizer.param_groups)
    losses = train(engine, STEPS)
    return losses, float(engine.get_global_grad_norm()), engine.get_lr(), cuboid.full_state_dict(engine)


@functools.cache
def trained_plain(path, grouping):
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(_groups(model, grouping), lr=1e-2)
    batches, losses, norm = _batches(0, 1), [], 0.0
    for _ in range(STEPS):
        losses.append(0.0)
        for _ in range(2):
            loss = model(**next(batches)).loss / 2
            loss.backward()
            losses[-1] += float(loss)
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norm, [group["lr"] for group in optimizer.param_groups], model.state_dict()


WAYS = ["filtered", "parameters", "with empty", "callable", "before", "filtered"]
GROUPINGS = ["head", "embedding", "three", "layer-wise", "frozen lower", "frozen upper", "frozen norms"]


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize(
    ("grouping", "layers", "zero", "way"),
    [
        ("head", EVEN, 1, "filtered"),
        ("layer-wise", UNEVEN, 1, "parameters"),
        ("frozen lower", EVEN, 1, "with empty"),
        ("embedding", UNEVEN, 0, "callable"),
        *(
            pytest.param(grouping, layers, zero, way, marks=pytest.mark.slow)
            for grouping in GROUPINGS
            for layers in (EVEN, UNEVEN)
            for zero in (0, 1)
            for way in WAYS[zero::2]
        ),
    ],
)
def test_groups_of_some_stages_only_train_as_in_one_process(pool, checkpoint, grouping, layers, zero, way):
    path = checkpoint(SMALL)
    results = pool.run(2, trained_grouped, path, _config(layers, zero=zero), grouping, way, timeout_s=TIMEOUT_S)
    check_trained(results, trained_plain(path, grouping), untouched=path, grouping=grouping)


def check_trained(results, plain, *, untouched, grouping):
    plain_losses, plain_norm, plain_rates, plain_state = plain
    losses, norm, _, state = results[0]
    assert losses == pytest.approx(plain_losses, abs=2e-5)
    assert norm == pytest.approx(plain_norm, rel=1e-4)
    # The groups are those of all stages together, on each.
    assert all(rates == results[0][2] for _, _, rates, _ in results)
    assert sorted(results[0][2]) == sorted(plain_rates)
    before = AutoModelForCausalLM.from_pretrained(untouched, dtype=torch.float32).state_dict()
    for name, weight in state.items():
        if _trains(grouping, name):
            assert float((weight - plain_state[name]).abs().max()) < 5e-4, name
        else:
            assert torch.equal(weight, before[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("grouping", GROUPINGS)
@pytest.mark.parametrize(
    ("layers", "mesh", "zero", "data", "pipeline"),
    [
        (EVEN, "1x1x1", 1, 2, {}),
        (UNEVEN, "1x2x1", 1, 1, {}),
        (None, "1x2x1", 1, 1, {}),
        (None, "1x1x2", 0, 1, {}),
        (EVEN, "1x1x1", 1, 1, {"schedule": "zero_bubble-v", "chunks": 2}),
        (EVEN, "1x1x1", 1, 1, {"schedule": "seq1f1b-interleaved", "chunks": 2}),
    ],
)
def test_groups_on_other_layouts(pool, checkpoint, grouping, layers, mesh, zero, data, pipeline):
    path, config = checkpoint(SMALL), _config(layers, mesh, zero=zero, data=data)
    if pipeline:
        config["pipeline"] |= {**pipeline, "stage_balance": "layers"}
    results = pool.run(ranks_of(config, data), trained_grouped, path, config, grouping, "filtered", timeout_s=TIMEOUT_S)
    check_trained(results, trained_plain(path, grouping), untouched=path, grouping=grouping)


@pytest.mark.parametrize("grouping", ["layer-wise", pytest.param("frozen lower", marks=pytest.mark.slow)])
def test_groups_in_bfloat16(pool, checkpoint, grouping):
    path = checkpoint(SMALL)
    config = _config(UNEVEN, bf16=True)
    losses, norm, rates, _ = pool.run(2, trained_grouped, path, config, grouping, "filtered", timeout_s=TIMEOUT_S)[0]
    plain_losses, plain_norm, plain_rates, _ = trained_plain(path, grouping)
    assert losses == pytest.approx(plain_losses, abs=3e-2)
    assert norm == pytest.approx(plain_norm, rel=5e-2)
    assert rates == plain_rates


def test_a_tied_parameter_is_in_one_group(pool, checkpoint):
    for seen in pool.run(2, _tied, checkpoint(TIED), timeout_s=TIMEOUT_S):
        losses, messages = seen
        assert losses == pytest.approx(trained_plain(checkpoint(TIED), "embedding")[0], abs=2e-5)
        apart, left_out = messages
        assert "model.embed_tokens.weight is on the first and on the last stage" in apart
        assert "put it into the same group on both" in apart
        assert "leaves it out of the optimizer" in left_out


def _tied(path):
    losses, *_ = trained_grouped(path, _config(EVEN), "embedding", "filtered")
    messages = []
    for kept in (True, False):
        model = _model(path, _config(EVEN))
        tied = model.get_parameter("model.embed_tokens.weight")
        others = [parameter for parameter in model.parameters() if parameter is not tied]
        is_first = cuboid.mesh_of(model).has_first_stage
        groups = [{"params": others, "lr": 1e-2}, {"params": [tied], "lr": 1e-3}]
        if not is_first:
            groups = [{"params": [*others, tied], "lr": 1e-2}] if kept else groups[:1]
        messages.append(_refusal(model, torch.optim.AdamW(groups), _config(EVEN)))
    return losses, messages


def _refusal(model, optimizer, config, **options):
    with pytest.raises(OptimizerError) as caught:
        deepspeed.initialize(model=model, optimizer=optimizer, config=config, **options)
    return str(caught.value)


def test_groups_that_cant_be_matched_are_errors_on_all_ranks(pool, checkpoint):
    for alike, turned, own_rates in pool.run(2, _unmatched, checkpoint(SMALL), timeout_s=TIMEOUT_S):
        assert "begin with model.embed_tokens.weight and model.layers.0" in alike
        assert 'give each group a key of its own, such as "name": "body"' in alike
        assert turned.startswith("the stages list the same parameter groups in different orders")
        assert "LambdaLR.lr_lambdas has an entry of its own for the parameter group of lm_head.weight" in own_rates


def _unmatched(path):
    config = _config(EVEN)
    model = _model(path, config)
    is_first = cuboid.mesh_of(model).has_first_stage
    named = dict(model.named_parameters())
    split = [{"params": [p for n, p in named.items() if "embed" in n]}, {"params": list(named.values())[1:]}]
    one = [{"params": list(named.values())}]
    alike = _refusal(model, torch.optim.AdamW(split if is_first else one), config)

    model = _model(path, config)
    norms = {"params": [p for n, p in model.named_parameters() if "norm" in n], "lr": 1e-3}
    others = {"params": [p for n, p in model.named_parameters() if "norm" not in n], "lr": 1e-2}
    turned = _refusal(model, torch.optim.AdamW([norms, others] if is_first else [others, norms]), config)

    model = _model(path, config)
    optimizer = torch.optim.AdamW(_groups(model, "three"))
    rates = [functools.partial(pow, group["lr"]) for group in optimizer.param_groups]
    schedule = lr_scheduler.LambdaLR(optimizer, rates)
    return alike, turned, _refusal(model, optimizer, config, lr_scheduler=schedule)


# --- resuming ---

LAYOUTS = {
    "one process": (None, "1x1x1", 1),
    "stages": (EVEN, "1x1x1", 1),
    "uneven stages": (UNEVEN, "1x1x1", 1),
    "mesh": (None, "1x2x1", 1),
    "mesh and stages": (UNEVEN, "1x2x1", 1),
    "stages and replicas": (EVEN, "1x1x1", 2),
}


def _rate(kind, step):
    return 1 / (1 + step * (1 + [*RATES].index(kind)))


def _each(optimizer, values):
    return [values[group["kind"]] for group in optimizer.param_groups]


SCHEDULES = {
    "one function": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "functions": lambda optimizer: lr_scheduler.LambdaLR(
        optimizer, _each(optimizer, {kind: functools.partial(_rate, kind) for kind in RATES})
    ),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, _each(optimizer, RATES), total_steps=12),
    "cyclic": lambda optimizer: lr_scheduler.CyclicLR(
        optimizer,
        _each(optimizer, {"embedding": 1e-4, "body": 1e-3, "head": 5e-4}),
        _each(optimizer, RATES),
        step_size_up=3,
        cycle_momentum=False,
    ),
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2), lr_scheduler.ExponentialLR(optimizer, 0.7)],
        [2],
    ),
    "multiplied": lambda optimizer: lr_scheduler.MultiplicativeLR(optimizer, lambda step: 0.9 if step % 2 else 0.8),
    "warm-up": lambda optimizer: deepspeed.runtime.lr_schedules.WarmupLR(
        optimizer, 0.0, _each(optimizer, RATES), 4, "linear"
    ),
}


def _three(model):
    groups = {kind: {"params": [], "lr": rate, "kind": kind} for kind, rate in RATES.items()}
    for name, parameter in model.named_parameters():
        groups[_kind("three", name)[0]]["params"].append(parameter)
    return [group for group in groups.values() if group["params"]]


def _scheduled(path, config, schedule, *, by_function):
    model = _model(path, config)
    optimizer = torch.optim.AdamW(_three(model))
    made = SCHEDULES[schedule] if by_function else SCHEDULES[schedule](optimizer)
    return deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=made, config=config)[0]


def _rates(engine):
    return {group["kind"]: group["lr"] for group in engine.optimizer.param_groups}


def saved_run(path, config, schedule, root, by_function):
    """Save after two steps and go on: losses and rates of the steps before and after."""
    engine = _scheduled(path, config, schedule, by_function=by_function)
    before = [(train(engine, 1, skip=step)[0], _rates(engine)) for step in range(2)]
    engine.save_checkpoint(root)
    return before, [(train(engine, 1, skip=step)[0], _rates(engine)) for step in range(2, 5)]


def resumed_run(path, config, schedule, root, by_function):
    engine = _scheduled(path, config, schedule, by_function=by_function)
    engine.load_checkpoint(root)
    return [(train(engine, 1, skip=step)[0], _rates(engine)) for step in range(2, 5)]


@functools.cache
def plain_rates(path, schedule):
    optimizer = torch.optim.AdamW(_three(AutoModelForCausalLM.from_pretrained(path)))
    made, rates = SCHEDULES[schedule](optimizer), []
    for _ in range(5):
        optimizer.step()
        made.step()
        rates.append({group["kind"]: group["lr"] for group in optimizer.param_groups})
    return rates


@pytest.fixture(scope="module")
def on_layout(pool, checkpoint):
    """Runs a function of a path, a config, a schedule and a folder on a layout."""

    def run(what, schedule, layout, root):
        layers, mesh, data = LAYOUTS[layout]
        config = _config(layers, mesh, data=data)
        # A rank doesn't have the functions of other stages' groups.
        job = (what, checkpoint(SMALL), config, schedule, root, schedule == "functions")
        # One process has one engine only: DeepSpeed keeps the groups of the first one.
        with pool.fresh() if layout == "one process" else contextlib.nullcontext(pool) as workers:
            return workers.run(ranks_of(config, data), *job, timeout_s=TIMEOUT_S)

    return run


@pytest.fixture(scope="module")
def saved(on_layout, tmp_path_factory):
    """The folder of a run that was saved halfway, and what each rank saw; made once for each schedule and layout."""

    @functools.cache
    def run_of(schedule, layout):
        root = str(tmp_path_factory.mktemp("saved"))
        return root, on_layout(saved_run, schedule, layout, root)

    return run_of


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize(
    ("schedule", "source", "target"),
    [
        ("functions", "uneven stages", "one process"),
        ("cyclic", "mesh and stages", "stages and replicas"),
        *(
            pytest.param(schedule, source, target, marks=pytest.mark.slow)
            for schedule in SCHEDULES
            for number, source in enumerate(LAYOUTS)
            for target in (source, [*LAYOUTS][number - 1], [*LAYOUTS][number - 2])
        ),
    ],
)
def test_rates_of_groups_go_on_after_resuming(on_layout, saved, checkpoint, schedule, source, target):
    wanted = plain_rates(checkpoint(SMALL), schedule)
    root, before_and_after = saved(schedule, source)
    for before, after in before_and_after:
        assert [rates for _, rates in before + after] == wanted
    straight = [loss for loss, _ in before_and_after[0][1]]
    for after in on_layout(resumed_run, schedule, target, root):
        assert [rates for _, rates in after] == wanted[2:]
        losses = [loss for loss, _ in after]
        assert losses == straight if source == target else losses == pytest.approx(straight, abs=1e-5)


def test_schedules_of_earlier_versions_load_where_their_groups_are_known(pool, checkpoint, tmp_path):
    pool.run(2, _without_names, checkpoint(SMALL), str(tmp_path), timeout_s=TIMEOUT_S)


def _without_names(path, root):
    config = _config(EVEN)
    engine = _scheduled(path, config, "one function", by_function=False)
    train(engine, 1)
    engine.save_checkpoint(root)
    opened = engine.checkpointing.open(Path(root))
    opened.document["scheduler_groups"] = None
    engine.checkpointing.load_scheduler(opened, engine.lr_scheduler)
    # What the first stage alone had: its embedding and its body.
    opened.document["scheduler"]["base_lrs"] = opened.document["scheduler"]["base_lrs"][:2]
    with pytest.raises(CheckpointError, match=r"base_lrs has 2 entries, .* but the optimizer has 3"):
        engine.checkpointing.load_scheduler(opened, engine.lr_scheduler)


# --- without ranks ---


def _listing(*groups, rank=0):
    parameters = {name: torch.nn.Parameter(torch.zeros(1)) for names, _ in groups for name in names}
    named = {id(parameter): name for name, parameter in parameters.items()}
    param_groups = [{"params": [parameters[name] for name in names], **options} for names, options in groups]
    return _stage(param_groups, named, [], rank, ())


def test_the_common_order_agrees_with_every_stage():
    stages = [
        _listing((["e"], {"lr": 1}), (["a"], {"lr": 2}), (["n"], {"lr": 2, "decay": 0})),
        _listing((["b"], {"lr": 2}), (["x"], {"lr": 5}), (["o"], {"lr": 2, "decay": 0})),
        _listing((["p"], {"lr": 2, "decay": 0}), (["h"], {"lr": 4})),
    ]
    order = [text for text, _ in _common_order(stages)]
    assert order == ["lr=1", "lr=2", "lr=5", "decay=0; lr=2", "lr=4"]


def test_groups_with_the_same_settings_are_matched_by_their_place_if_each_stage_has_all():
    twice = [_listing((["a"], {"lr": 1}), (["b"], {"lr": 1})), _listing(([], {"lr": 1}), (["d"], {"lr": 1}))]
    assert _common_order(twice) == [("lr=1", 0), ("lr=1", 1)]
    with pytest.raises(OptimizerError, match=r"begin with a and b .* \(the one that begins with c\)"):
        _common_order([twice[0], _listing((["c"], {"lr": 1}), rank=1)])


def _order(*stages):
    order = [text for text, _ in _common_order(stages)]
    return [text.removeprefix("name=").strip("'") for text in order]


def _in_model_order(*listed, model):
    """A stage's listing of some groups, whose parameters are in the model in another order."""
    parameters = {name: torch.nn.Parameter(torch.zeros(1)) for name in model}
    named = {id(parameters[name]): name for name in model}
    groups = [{"params": [parameters[name]], "name": name} for name in listed]
    return _stage(groups, named, [], 0, ())


def test_groups_are_in_the_order_of_one_process():
    lower, upper = ("embed", "l0", "l1"), ("l2", "l3", "head")
    up = [_in_model_order(*names, model=names) for names in (lower, upper)]
    assert _order(*up) == [*lower, *upper]
    down = [_in_model_order(*reversed(names), model=names) for names in (lower, upper)]
    assert _order(*down) == [*reversed(lower + upper)]
    # A group on both stages says more than the direction.
    crossed = [
        _in_model_order("embed", "body", model=("embed", "body")),
        _in_model_order("head", "body", model=("body", "head")),
    ]
    assert _order(*crossed) == ["embed", "head", "body"]
    first, second = SimpleNamespace(rank=0), SimpleNamespace(rank=1)
    for stages, warns in ((up, False), (down, False), (crossed, True), ([up[0], down[1]], True)):
        order = _common_order(stages)
        with pytest.warns(UserWarning, match="in optimizer.param_groups") if warns else contextlib.nullcontext():
            _warn_of_order(stages, order, first)
        _warn_of_order(stages, order, second)


def test_groups_of_layers_with_the_same_settings_cant_be_changed_by_their_index():
    def listing(*groups):
        return _listing(*((list(names), {"lr": 1}) for names in groups))

    layers = [listing(["l.0.q"], ["l.1.q"]), listing(["l.2.q"], ["l.3.q"])]
    kinds = [listing(["l.0.q", "l.1.q"], ["l.0.norm"]), listing(["l.2.q"], ["l.2.norm", "norm"])]
    complete = [listing(["l.0.q"], []), listing([], ["l.1.q"])]
    assert [_unsure(stages, _common_order(stages)) for stages in (layers, kinds, complete)] == [[(0, 1)], [], []]
    aligned = AlignedGroups((("l.0.q", "l.2.q"), ("l.1.q", "l.3.q")), ((0, 1),))
    aligned.check([{"params": [1], "lr": 2}, {"params": [2], "lr": 2}])
    with pytest.raises(OptimizerError, match=r"groups 0 and 1, which begin with l\.0\.q and l\.1\.q, had the same"):
        aligned.check([{"params": [1], "lr": 1}, {"params": [2], "lr": 2}])


def _set_by_index(path, frameworks_optimizer):
    config = _config(EVEN)
    model = _model(path, config)
    groups = [{"params": list(layer.parameters())} for layer in model.model.layers if layer_is_here(layer)]
    if frameworks_optimizer:
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
        engine = deepspeed.initialize(model=model, model_parameters=groups, config=config)[0]
    else:
        engine = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(groups, lr=1e-2), config=config)[0]
    train(engine, 1)
    for group in engine.optimizer.param_groups:
        group["lr"] = 1e-3
    train(engine, 1)
    engine.optimizer.param_groups[1]["lr"] = 1e-4
    with pytest.raises(OptimizerError) as caught:
        train(engine, 1)
    return str(caught.value)


def layer_is_here(layer):
    return any(True for _ in layer.parameters())


@pytest.mark.ci
@pytest.mark.parametrize("frameworks_optimizer", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_script_that_sets_one_of_such_groups_is_told_so_in_the_next_step(pool, checkpoint, frameworks_optimizer):
    for message in pool.run(2, _set_by_index, checkpoint(SMALL), frameworks_optimizer, timeout_s=TIMEOUT_S):
        assert "parameter groups 0 and 1, which begin with model.layers.0." in message
        assert 'such as "name": "body"' in message


def test_functions_are_described_by_what_they_compute():
    def maker(factor):
        return lambda step: step * factor

    assert described(maker(2)) == described(maker(2)) != described(maker(3))
    assert described(functools.partial(pow, 2)) == described(functools.partial(pow, 2))
    assert described(functools.partial(pow, 2)) != described(functools.partial(pow, 3))
    assert described({"lr": torch.tensor(0.5)}) == described({"lr": torch.tensor(0.5)})


def test_lists_of_a_schedule_follow_the_names_of_parameters():
    state = {"base_lrs": [1.0, 2.0, 3.0], "last_epoch": 5, "_schedulers": [{"base_lrs": [1.0, 2.0, 3.0], "gamma": 2}]}
    present = {"base_lrs": [0.0, 9.0, 0.0], "_schedulers": [{"base_lrs": [0.0, 9.0, 0.0]}]}
    saved = [["a"], ["b", "c"], ["d"]]
    loaded = regrouped(state, saved, [["d"], [], ["b"]], present)
    assert loaded == {
        "base_lrs": [3.0, 9.0, 2.0],
        "last_epoch": 5,
        "_schedulers": [{"base_lrs": [3.0, 9.0, 2.0], "gamma": 2}],
    }
    # As ColossalAI's schedules with a warm-up have the one that follows.
    after = {"after_scheduler_dict": {"base_lrs": [1.0, 2.0, 3.0]}}
    assert regrouped(after, saved, [["d"], ["a"], ["b"]], after) == {
        "after_scheduler_dict": {"base_lrs": [3.0, 1.0, 2.0]}
    }
    with pytest.raises(CheckpointError, match="a and d are in one parameter group here"):
        regrouped(state, saved, [["a", "d"]], present)
    with pytest.raises(CheckpointError, match="nothing for the parameter group of x"):
        regrouped(state, saved, [["x"]], present)
