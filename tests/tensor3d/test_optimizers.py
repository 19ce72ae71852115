"""Optimizers on shards, stages and replicas: equal to one process, or rejected when the engine is made."""

import copy
import functools
import types
from pathlib import Path

import deepspeed
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, TrainingArguments
from transformers.optimization import Adafactor as TransformersAdafactor

import cuboid
from cuboid.errors import ConfigError, CuboidError, OptimizerError
from cuboid.optim import elementwise
from cuboid.optim.elementwise import OwnedShards, check_optimizer

CUT, FLAT, SPREAD = (
    OwnedShards(cut="a mesh"),
    OwnedShards(flat="ZeRO"),
    OwnedShards(spread="stages"),
)
WHOLE = OwnedShards()


class Lion(torch.optim.Optimizer):
    """An unknown optimizer that treats each element by itself."""

    def __init__(self, params, lr=1e-3, weight_decay=0.1):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                moment = self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter))
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_((0.9 * moment + 0.1 * parameter.grad).sign(), alpha=-group["lr"])
                moment.lerp_(parameter.grad, 0.01)


class Lamb(torch.optim.Optimizer):
    """Scales the step of each tensor by norms of the full tensor."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                square = self.state[parameter].setdefault("exp_avg_sq", torch.zeros_like(parameter))
                square.mul_(0.9).addcmul_(parameter.grad, parameter.grad, value=0.1)
                step = parameter.grad / (square.sqrt() + 1e-6)
                parameter.sub_(step * (group["lr"] * parameter.norm() / step.norm()))


class Quiet(torch.optim.AdamW):
    """A subclass that changes nothing."""

    def step(self, closure=None):
        return super().step(closure)


class QuietMuon(torch.optim.Muon):
    """Likewise, of one that needs whole matrices."""

    def step(self, closure=None):
        return super().step(closure)


class QuietAdafactor(torch.optim.Adafactor):
    """Likewise, of one whose state isn't of its parameter's shape."""

    def step(self, closure=None):
        return super().step(closure)


class Clipping(torch.optim.AdamW):
    """A subclass that clips by the norm of all its parameters."""

    def step(self, closure=None):
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1.0)
        return super().step(closure)


class OnlyMatrices(torch.optim.SGD):
    """Applies weight decay to matrices only, so that they must not be flattened."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.dim() > 1:
                    parameter.mul_(0.9)
        return super().step(closure)


class Estimating(torch.optim.SGD):
    """Computes one number over all parameters, and uses it."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["d"] = sum(float(p.grad.abs().sum()) for p in group["params"])
        return super().step(closure)


class Forgetful(torch.optim.SGD):
    """Has a state under a name instead of a parameter."""

    def step(self, closure=None):
        self.state["all"]["steps"] = 1
        return super().step(closure)


class Collective(torch.optim.SGD):
    """Communicates."""

    def step(self, closure=None):
        torch.distributed.all_reduce(torch.ones(1))
        return super().step(closure)


class LookAhead(torch.optim.Optimizer):
    """Wraps another optimizer."""

    def __init__(self, optimizer):
        self.inner = optimizer
        super().__init__(optimizer.param_groups, {})

    def step(self, closure=None):
        self.inner.step()


def parameters():
    return [nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(6))]


def matrices():
    return [nn.Parameter(torch.randn(6, 4))]


ELEMENTWISE = ("Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")


@pytest.mark.sample(4, ci=8)
@pytest.mark.parametrize("name", ELEMENTWISE)
@pytest.mark.parametrize("pieces", [CUT, FLAT, SPREAD], ids=["cut", "flat", "spread"])
def test_a_trial_agrees_with_what_is_known_of_torchs_optimizers(monkeypatch, name, pieces):
    monkeypatch.setattr(elementwise, "_ELEMENTWISE", frozenset())
    kind = getattr(torch.optim, name)
    if name == "Adagrad":
        # Its constructor makes its state, which a copy for other parameters doesn't get.
        kind = type("Lazy", (kind,), {"step": lambda self, closure=None: adagrad_step(self)})
    optimizer = kind(parameters(), lr=1e-3)
    before = copy.deepcopy(optimizer.state_dict())
    check_optimizer(optimizer, pieces)
    assert str(optimizer.state_dict()) == str(before)


@torch.no_grad()
def adagrad_step(self):
    for group in self.param_groups:
        for parameter in group["params"]:
            total = self.state[parameter].setdefault("sum", torch.zeros_like(parameter))
            total.addcmul_(parameter.grad, parameter.grad)
            parameter.addcdiv_(parameter.grad, total.sqrt() + 1e-10, value=-group["lr"])


@pytest.mark.sample(2, ci=3)
@pytest.mark.parametrize(
    ("make", "on_pieces", "needs_whole"),
    [
        (lambda: Lion(parameters()), [CUT, FLAT, SPREAD, WHOLE], []),
        (lambda: Quiet(parameters(), lr=0.0), [CUT, FLAT, SPREAD, WHOLE], []),
        (lambda: Quiet(parameters(), lr=torch.tensor(0.1), foreach=False), [CUT, FLAT, SPREAD, WHOLE], []),
        (lambda: OnlyMatrices(parameters(), lr=1e-2), [CUT, SPREAD, WHOLE], [FLAT]),
        (lambda: Lamb(parameters()), [SPREAD, WHOLE], [CUT, FLAT]),
        (lambda: torch.optim.Muon(matrices()), [], [CUT, FLAT, SPREAD, WHOLE]),
        (lambda: QuietMuon(matrices()), [SPREAD, WHOLE], [CUT, FLAT]),
        (lambda: Clipping(parameters()), [WHOLE], []),
        (lambda: Estimating(parameters(), lr=1e-2), [WHOLE], []),
        (lambda: Collective(parameters(), lr=1e-2), [WHOLE], []),
        (lambda: torch.optim.Adafactor(parameters()), [], [CUT, FLAT, SPREAD, WHOLE]),
        (lambda: TransformersAdafactor(parameters()), [], [CUT, FLAT, SPREAD, WHOLE]),
        (lambda: QuietAdafactor(parameters()), [], [CUT, FLAT, SPREAD, WHOLE]),
        (lambda: torch.optim.LBFGS(parameters()), [], []),
        (lambda: torch.optim.SparseAdam(parameters()), [WHOLE], []),
        (lambda: LookAhead(torch.optim.SGD(parameters(), lr=1e-2)), [], []),
        (lambda: Forgetful(parameters(), lr=1e-2), [], []),
    ],
    ids=lambda value: None,
)
def test_a_trial_finds_on_which_pieces_an_optimizer_is_correct_or_needs_whole_tensors(make, on_pieces, needs_whole):
    for owned in (CUT, FLAT, SPREAD, WHOLE):
        optimizer = make()
        values = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]
        state = torch.get_rng_state()
        if owned in on_pieces or owned in needs_whole:
            assert (check_optimizer(optimizer, owned) is not None) == (owned in needs_whole)
        else:
            with pytest.raises(OptimizerError, match=type(optimizer).__name__):
                check_optimizer(optimizer, owned)
        now = [p for group in optimizer.param_groups for p in group["params"]]
        assert all(torch.equal(one, other) for one, other in zip(values, now, strict=True))
        assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("make", [lambda: torch.optim.Muon(matrices()), lambda: Lamb(parameters())])
def test_whole_tensors_are_refused_where_masters_are_on_the_host(make):
    on_host = OwnedShards(cut="a mesh", flat="ZeRO", fixed="offload_optimizer")
    with pytest.raises(OptimizerError, match="leave out offload_optimizer"):
        check_optimizer(make(), on_host)
    assert check_optimizer(Lion(parameters()), on_host) is None


def test_a_trial_does_not_depend_on_the_default_dtype():
    usual = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        check_optimizer(Lion(parameters()), CUT)
    finally:
        torch.set_default_dtype(usual)


def test_groups_are_tried_with_their_own_settings():
    settings = {"scale_parameter": False, "relative_step": False, "lr": 1e-3}
    groups = [{"params": matrices(), **settings}, {"params": matrices(), **settings, "clip_threshold": 1e-3}]

    class Quieter(TransformersAdafactor):
        def step(self, closure=None):
            return super().step(closure)

    assert check_optimizer(Quieter(groups), CUT) is not None

    class PerGroup(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                if group["whole"]:
                    for parameter in group["params"]:
                        parameter.grad /= parameter.grad.norm()
            return super().step(closure)

    assert check_optimizer(PerGroup([{"params": parameters(), "whole": False}], lr=0.1), CUT) is None
    mixed = [{"params": parameters(), "whole": False}, {"params": parameters(), "whole": True}]
    assert check_optimizer(PerGroup(mixed, lr=0.1), CUT) is not None


def test_hooks_and_replaced_steps_are_rejected_if_they_would_see_pieces():
    hooked = torch.optim.AdamW(parameters())
    hooked.register_step_pre_hook(lambda *_: None)
    replaced = torch.optim.AdamW(parameters())
    replaced.step = types.MethodType(lambda self, closure=None: None, replaced)
    others = {"pairs": [tuple(parameters())]}

    class Knowing(torch.optim.SGD):
        def step(self, closure=None):
            for first, second in others["pairs"]:
                if first.grad is not None:
                    first.grad *= second.norm()
            return super().step(closure)

    knowing = Knowing(parameters(), lr=0.1)
    for optimizer, words in (
        (hooked, "step hook"),
        (replaced, "replaced on the object"),
        (knowing, r"Knowing\.step uses tensors"),
    ):
        check_optimizer(optimizer, WHOLE)
        with pytest.raises(OptimizerError, match=words):
            check_optimizer(optimizer, CUT)
    scheduled = torch.optim.AdamW(parameters())
    torch.optim.lr_scheduler.LambdaLR(scheduled, lambda step: 0.0)
    check_optimizer(scheduled, CUT)


# --- on real ranks ---------------------------------------------------------------------------------------------

SIZES = {"vocab_size": 48, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
STEPS = 3
#: Tolerance on weights, relative to how far they moved: rounding can flip the sign of the smallest gradients.
CLOSE = 2e-3


def settings(mesh=(1, 1, 1), stage=0, stages=None, **others):
    config = {
        "train_micro_batch_size_per_gpu": 2 if mesh == (1, 1, 1) and stages is None else 4,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
        "tensor_parallel": {"mode": "3d_tensor", "mesh": dict(zip(("batch", "sequence", "hidden"), mesh, strict=True))},
        **others,
    }
    if stages is not None:
        config["pipeline"] = {"engine": "seq1f1b", "stages": stages, "segments": 2}
    return config


def fresh_model(**options):
    torch.manual_seed(0)
    config = LlamaConfig(num_attention_heads=4, num_key_value_heads=4, **SIZES, **options)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()


def batch_of(step, replica=0, replicas=1):
    ids = torch.randint(0, 48, (4, 8), generator=torch.Generator().manual_seed(step))[replica::replicas]
    return {"input_ids": ids, "labels": ids}


def made(kind, model, lr=1e-2, **options):
    """An optimizer with two groups of different settings."""
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "lr": lr / 3},
        {"params": [p for p in model.parameters() if p.dim() == 1]},
    ]
    return kind(groups, lr=lr, **options)


def halving(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)


@functools.cache
def alone(kind, options):
    """Weights before and after some steps in one process."""
    model = fresh_model()
    start = copy.deepcopy(model.state_dict())
    optimizer = made(kind, model, **dict(options))
    schedule = halving(optimizer)
    for step in range(STEPS):
        model(**batch_of(step), use_cache=False).loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return start, model.state_dict()


def difference(model, kind, options):
    """The error of the weights, relative to how far they moved; on rank 0."""
    trained = cuboid.full_state_dict(model)
    if not trained:
        return 0.0
    start, wanted = alone(kind, tuple(options.items()))

    def norm(one, other):
        return sum(float((one[name] - other[name]).square().sum()) for name in wanted) ** 0.5

    return norm(trained, wanted) / norm(wanted, start)


def with_deepspeed(kind, options, config, *, early):
    """Weights as :func:`alone`, how far they are off.

    Args:
        early: whether the optimizer is made before the model is sharded.
    """
    model = fresh_model()
    model = model if early else cuboid.shard(model, config)
    optimizer = made(kind, model, **options)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, lr_scheduler=halving(optimizer))
    mesh = cuboid.mesh_of(engine)
    for step in range(STEPS):
        batch = batch_of(step, mesh.coordinate.data, mesh.topology.data)
        if hasattr(engine, "train_batch"):
            engine.train_batch(iter([batch]))
        else:
            engine.backward(engine(**batch).loss)
            engine.step()
    return difference(engine, kind, options)


def with_booster(kind, options, config, *, early):
    """As :func:`with_deepspeed`."""
    from colossalai.booster import Booster

    config = {key: value for key, value in config.items() if key != "zero_allow_untested_optimizer"}
    model = fresh_model()
    model = model if early else cuboid.shard(model, config)
    optimizer = made(kind, model, **options)
    schedule = halving(optimizer)
    booster = Booster(plugin=cuboid.CuboidPlugin(config))
    model, optimizer, _, _, schedule = booster.boost(model, optimizer, lr_scheduler=schedule)
    mesh = cuboid.mesh_of(model)
    for step in range(STEPS):
        batch = batch_of(step, mesh.coordinate.data, mesh.topology.data)
        if model.pipeline is not None:
            booster.execute_pipeline(iter([batch]), model, None, optimizer)
        else:
            booster.backward(model(**batch).loss, optimizer)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return difference(model, kind, options)


def job(framework, cases, config, early=True):
    """The error of each case relative to one process, or its error message."""
    by_case = {}
    run = with_booster if framework == "booster" else with_deepspeed
    for name, kind, kwargs in cases:
        try:
            by_case[name] = run(kind, kwargs, config, early=early)
        except CuboidError as error:
            by_case[name] = str(error)
    return by_case


ACCEPTED = [
    *((name, getattr(torch.optim, name), {}) for name in ELEMENTWISE if name != "Adadelta"),
    ("Adadelta", torch.optim.Adadelta, {"lr": 30.0}),
    ("SGD with momentum", torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "foreach": True}),
    ("AdamW with AMSGrad", torch.optim.AdamW, {"amsgrad": True, "maximize": True}),
    ("Lion", Lion, {}),
    ("a subclass", Quiet, {}),
]
NEEDS_WHOLE = [("Lamb", Lamb, {}), ("Adafactor", torch.optim.Adafactor, {})]
REFUSED = [("a clipping subclass", Clipping, {})]
#: DeepSpeed's ZeRO replaces torch's Adagrad by its own, which has other defaults.
REMADE = {"Adagrad"}


@pytest.mark.sample(1, ci=1)
@pytest.mark.parametrize(
    ("framework", "config", "early", "every"),
    [
        ("deepspeed", settings((1, 1, 2)), True, 1),
        ("deepspeed", settings((1, 1, 2), stage=1), False, 4),
        ("deepspeed", settings(stage=1), True, 1),
        ("booster", settings((1, 1, 2)), True, 4),
        ("booster", settings(stage=1), False, 1),
        # The engine on a mesh shows every optimizer for each change.
        ("booster", settings(stage=1), False, 4),
    ],
    ids=[
        *("mesh", "mesh, ZeRO 1", "replicas, ZeRO 1", "Booster, mesh", "Booster, replicas, ZeRO 1"),
        "Booster, replicas, a quarter",
    ],
)
def test_optimizers_give_the_same_as_in_one_process_or_are_rejected(pool, framework, config, early, every):
    if framework == "booster":
        pytest.importorskip("colossalai.booster", exc_type=ImportError)
    remade = REMADE if framework == "deepspeed" and config["zero_optimization"]["stage"] else set()
    accepted = [*ACCEPTED[::every], *NEEDS_WHOLE]
    for by_case in pool.run(2, job, framework, [*accepted, *REFUSED], config, early):
        for name, _, _ in accepted:
            if name in remade:
                assert "puts a new one in its place" in by_case[name]
            else:
                assert isinstance(by_case[name], float), by_case[name]
                assert by_case[name] < CLOSE, name
        for name, kind, _ in REFUSED:
            assert kind.__name__ in by_case[name]
            assert "AdamW" in by_case[name]


@pytest.mark.ci
@pytest.mark.parametrize("framework", ["deepspeed", "booster"])
def test_optimizers_that_need_full_tensors_work_where_tensors_are_full(pool, framework):
    if framework == "booster":
        pytest.importorskip("colossalai.booster", exc_type=ImportError)
    cases = [("Lamb", Lamb, {}), ("a clipping subclass", Clipping, {}), ("AdamW", torch.optim.AdamW, {})]
    stages = pool.run(2, job, framework, cases, settings(stages=2))
    replicas = pool.run(2, job, framework, cases, settings())
    for staged, replicated in zip(stages, replicas, strict=True):
        assert staged["Lamb"] < CLOSE
        assert staged["AdamW"] < CLOSE
        assert "uses more than the element" in staged["a clipping subclass"]
        assert all(off < CLOSE for off in replicated.values())


# --- parameters of the optimizer -------------------------------------------------------------------------------


def error_of(call):
    try:
        call()
    except CuboidError as error:
        return str(error)
    return ""


def initialized(model, config, **options):
    engine, *_ = deepspeed.initialize(model=model, config=config, **options)
    return engine


def foreign_parameters(config):
    """The errors of ``initialize`` and ``boost`` for optimizers and schedules of other parameters."""
    from colossalai.booster import Booster

    sgd = torch.optim.SGD
    by_booster = {key: value for key, value in config.items() if key != "zero_allow_untested_optimizer"}

    def of_another():
        return sgd(fresh_model().parameters(), lr=0.1)

    def partly(model):
        return sgd([*model.parameters(), nn.Parameter(torch.ones(3))], lr=0.1)

    def twice(model):
        return sgd([next(model.parameters())] * 2, lr=0.1)

    def boost(model, optimizer, schedule=None):
        return Booster(plugin=cuboid.CuboidPlugin(by_booster)).boost(model, optimizer, lr_scheduler=schedule)

    def stepped(model):
        optimizer = torch.optim.AdamW(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        return optimizer

    errors = {}
    for name, make in {"another": lambda _: of_another(), "partly": partly, "twice": twice, "stepped": stepped}.items():
        one, other = fresh_model(), fresh_model()
        errors[name] = error_of(lambda make=make, one=one: initialized(one, config, optimizer=make(one)))
        errors[f"{name}, boosted"] = error_of(lambda make=make, other=other: boost(other, make(other)))
    model = fresh_model()
    errors["parameters"] = error_of(lambda: initialized(model, config, model_parameters=[nn.Parameter(torch.ones(3))]))
    model = fresh_model()
    optimizer, schedule = sgd(model.parameters(), lr=0.1), halving(of_another())
    errors["schedule"] = error_of(lambda: initialized(model, config, optimizer=optimizer, lr_scheduler=schedule))
    model = fresh_model()
    optimizer = sgd(model.parameters(), lr=0.1)
    errors["schedule, boosted"] = error_of(lambda: boost(model, optimizer, schedule))
    model = fresh_model()
    errors["made"] = error_of(lambda: initialized(model, config, optimizer=lambda parameters: Clipping(parameters)))
    model = fresh_model()
    errors["no optimizer"] = error_of(lambda: initialized(model, config, optimizer=lambda parameters: list(parameters)))
    lamb = {
        **config,
        "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
        "optimizer": {"type": "Lamb", "params": {"lr": 0.1}},
    }
    errors["section"] = error_of(lambda: initialized(fresh_model(), lamb))
    return errors


FOREIGN_PARAMETERS = {
    "another": "isn't the model's, and would train without effect",
    "partly": "isn't the model's, and would train without effect",
    "twice": "twice",
    "stepped": "has state for whole parameters",
    "parameters": "shape [3] that isn't the model's",
    "schedule": "LambdaLR is of another optimizer",
    "made": "Clipping uses more than the element",
    "no optimizer": "made a list",
    "section": "Lamb takes norms of whole tensors",
}


def test_optimizers_of_other_parameters_are_rejected(pool):
    pytest.importorskip("colossalai.booster", exc_type=ImportError)
    for errors in pool.run(2, foreign_parameters, settings((1, 1, 2))):
        for name, message in errors.items():
            assert FOREIGN_PARAMETERS[name.partition(", boosted")[0]] in message, name


ON_HOST = {"stage": 1, "offload_optimizer": {"device": "cpu"}}
MUON = {"type": "Muon", "params": {"lr": 1e-2}}
OF_STAGE_3 = (
    "stage 3 would split parameters that the mesh splits already; use stage 1 or 2, and tensor_parallel.mesh.batch"
)
OF_HOST = "as AdamW, Adam, SGD, RMSprop, Adagrad or Lion; or leave out zero_optimization.offload_optimizer"


def whole_tensors_refused(folder):
    """The errors of each door for optimizers of whole tensors, with masters on the host and with ZeRO 3."""
    from cuboid.train.job import TrainOptions, check_options

    def trained(model, zero, optimizer=None):
        config = settings((1, 1, 2), zero_optimization=zero, **({} if optimizer is None else {"optimizer": optimizer}))
        options = {"max_steps": 1, "report_to": [], "save_strategy": "no", "per_device_train_batch_size": 4}
        arguments = TrainingArguments(
            folder, deepspeed=config, use_cpu=True, max_grad_norm=0.0, optim="adafactor", learning_rate=1e-2, **options
        )
        rows = [{key: value[0] for key, value in batch_of(0).items()}] * 4
        cuboid.CuboidTrainer(model=model, args=arguments, train_dataset=rows).train()

    def of_command(zero):
        config = settings((1, 1, 2), zero_optimization=zero, optimizer=MUON)
        files = {name: Path(folder) / name for name in ("model", "data", "out")}
        check_options(TrainOptions(**files, config=config, steps=1, sequence_length=8))

    errors = {}
    for of, zero in (("host", ON_HOST), ("stage 3", {"stage": 3})):
        config = settings((1, 1, 2), zero_optimization=zero)
        for optimizer in (MUON, {"type": "Lamb", "params": {}}, {"type": "Adafactor", "params": {}}):
            section = {**config, "optimizer": optimizer}
            errors[of, optimizer["type"]] = error_of(lambda section=section: initialized(fresh_model(), section))
        model = fresh_model()
        optimizer = torch.optim.Adafactor(model.parameters())
        errors[of, "object"] = error_of(
            lambda config=config, model=model, of_script=optimizer: initialized(model, config, optimizer=of_script)
        )
        errors[of, "Trainer"] = error_of(lambda zero=zero: trained(fresh_model(), zero, MUON))
        errors[of, "Trainer's own"] = error_of(lambda zero=zero: trained(fresh_model(), zero))
    errors["stage 3", "command"] = error_of(lambda: of_command({"stage": 3}))
    return errors


def test_optimizers_of_whole_tensors_are_refused_at_each_door(pool, tmp_path):
    for errors in pool.run(2, whole_tensors_refused, str(tmp_path)):
        for (of, door), message in errors.items():
            expected = {"host": OF_HOST, "stage 3": OF_STAGE_3}[of]
            if (of, door) == ("host", "Trainer's own"):
                expected = "silently train with DeepSpeed's CPUAdam in place of Adafactor"
            assert expected in message, (of, door, message)


@pytest.mark.parametrize(
    ("zero", "message"),
    [(ON_HOST, "offload_optimizer"), ({"stage": 3}, "zero_optimization.stage")],
)
def test_a_booster_has_neither_zero_3_nor_masters_on_the_host(zero, message):
    pytest.importorskip("colossalai.booster", exc_type=ImportError)
    config = {
        key: value for key, value in settings(zero_optimization=zero).items() if key != "zero_allow_untested_optimizer"
    }
    with pytest.raises(ConfigError, match=message):
        cuboid.CuboidPlugin(config)


def remapped(config):
    """Whether the sharded parameters reach the optimizer if ``model_parameters`` was taken before sharding."""
    ways = {
        "generator": lambda model: model.parameters(),
        "names": lambda model: list(model.named_parameters()),
        "filter": lambda model: filter(lambda p: p.requires_grad, list(model.parameters())),
        "groups": lambda model: [{"params": model.parameters(), "weight_decay": 0.5}],
    }
    moved = {}
    for name, way in ways.items():
        model = fresh_model(tie_word_embeddings=True)
        model_parameters = way(model)
        cuboid.shard(model, config)
        engine = initialized(
            model, config, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), model_parameters=model_parameters
        )
        moved[name] = moves(engine, lambda engine: engine.optimizer)
    model = fresh_model(tie_word_embeddings=True)
    optimizer = torch.optim.Adagrad(list(model.named_parameters()), lr=0.1)
    cuboid.shard(model, config)
    engine = initialized(model, config, optimizer=optimizer)
    moved["an optimizer"] = moves(engine, lambda engine: engine.optimizer)
    return moved


def moves(engine, optimizer_of):
    """Whether a step changes all parameters of this rank."""
    before = [p.detach().clone() for p in engine.module.parameters()]
    batch = batch_of(0)
    if hasattr(engine, "train_batch"):
        engine.train_batch(iter([batch]))
    else:
        engine.backward(engine(**batch).loss)
        engine.step()
    count = sum(len(group["params"]) for group in optimizer_of(engine).param_groups)
    moved = all(not torch.equal(p, old) for p, old in zip(engine.module.parameters(), before, strict=True))
    return moved and count == len(before)


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize("config", [settings((1, 1, 2)), settings(stages=2)], ids=["mesh", "stages"])
def test_parameters_from_before_sharding_are_mapped_to_the_sharded_ones(pool, config):
    for moved in pool.run(2, remapped, config):
        assert all(moved.values()), moved
