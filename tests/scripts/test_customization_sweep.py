"""All that scripts change on a model, by all ways into Cuboid, on meshes and stages: right, or refused by name."""

import contextlib
import re

import deepspeed
import pytest
import torch
import torch.distributed as dist

import cuboid
from cuboid.models.certification.float64 import KeepFloat64
from cuboid.models.sharded.sharded_model import unwrap
from cuboid.verify import WorkerPool
from customizing import NAMED, ROWS, all_changes, batch, built

CHANGES = all_changes()
LAYOUTS = {
    "1x2x1": ((1, 2, 1), 1),
    "2x1x1": ((2, 1, 1), 1),
    "1x1x2": ((1, 1, 2), 1),
    "2 stages": ((1, 1, 1), 2),
    "2 stages of 1x2x1": ((1, 2, 1), 2),
}
ENTRIES = ("shard", "load", "initialize", "booster")
#: When the script changes it: the whole model; the sharded one, before a framework gets it; after that; after a step.
MOMENTS = ("whole", "sharded", "engine", "later")
RATE = 0.25
TIMEOUT_S = 900.0
NOT_OURS = "(not ours)"
SCRIPTS_LINE = "in the script's own line"


def config_of(layout, entry):
    mesh, stages = LAYOUTS[layout]
    config = {"train_micro_batch_size_per_gpu": ROWS, "gradient_accumulation_steps": 1}
    if entry == "initialize":
        config |= {"gradient_clipping": 0.0, "zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}
    if mesh != (1, 1, 1):
        axes = dict(zip(("batch", "sequence", "hidden"), mesh, strict=True))
        config["tensor_parallel"] = {"mode": "3d_tensor", "mesh": axes}
    if stages > 1:
        config["pipeline"] = {"engine": "seq1f1b", "stages": stages, "segments": 2, "partition": "even"}
    return config


def ranks_of(layout):
    (batch_, sequence, hidden), stages = LAYOUTS[layout]
    return batch_ * sequence * hidden * stages


class Run:
    """A model by one of the ways into Cuboid, and its steps."""

    def __init__(self, entry, layout, path, change, moment):
        config = config_of(layout, entry)
        # An engine may be given a whole model, or one that is sharded.
        is_whole = entry != "load" and moment != "sharded"
        if is_whole:
            self.model = built(change.cls, tied=change.tied)
            if moment == "whole":
                change.apply(self.model)
            if entry == "shard":
                self.model = cuboid.shard(self.model, config)
        else:
            with cuboid.scope(config):
                self.model = change.cls.from_pretrained(path[change.tied], dtype=torch.float64).train()
        self.engine = self.booster = None
        self.entry, self.config, self.stages = entry, config, LAYOUTS[layout][1]

    def start(self):
        """Make the optimizer, and the engine or what boosts the model."""
        self.optimizer = torch.optim.SGD((p for p in self.model.parameters() if p.requires_grad), lr=RATE)
        if self.entry == "initialize":
            self.engine = deepspeed.initialize(model=self.model, optimizer=self.optimizer, config=self.config)[0]
            self.model = unwrap(self.engine)
        elif self.entry == "booster":
            from colossalai.booster import Booster

            self.booster = Booster(plugin=cuboid.CuboidPlugin(self.config))
            boosted, self.optimizer, *_ = self.booster.boost(self.model, self.optimizer)
            self.boosted, self.model = boosted, unwrap(boosted)

    def step(self):
        """One step on the batch; its loss."""
        if self.engine is not None:
            if self.stages > 1:
                return float(self.engine.train_batch(iter([batch()])))
            loss = self.engine(**batch()).loss
            self.engine.backward(loss)
            self.engine.step()
            return float(loss)
        if self.stages > 1 and self.booster is not None:
            loss = self.booster.execute_pipeline(iter([batch()]), self.boosted, None, self.optimizer)["loss"]
        elif self.stages > 1:
            loss = cuboid.Pipeline(self.model).train(iter([batch()]), 1)
        else:
            loss = (self.boosted if self.booster else self.model)(**batch()).loss
            self.booster.backward(loss, self.optimizer) if self.booster else loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss)

    def check(self):
        """What a step of a pipeline does first; there, an error on one stage ends the job."""
        if self.stages > 1:
            self.model.check_settings()
            self.model.cuboid.state.made.check(self.model)


def in_script(change, model):
    """Change a model; see :meth:`Change.apply`. What fails there fails in the script's own line."""
    try:
        return change.apply(model)
    except cuboid.CuboidError:
        raise
    except Exception as error:
        raise ScriptError(f"{SCRIPTS_LINE}: {type(error).__name__}: {error}") from error


class ScriptError(Exception):
    """A line of the script that changes a model has failed."""


class Refused(Exception):
    """Some rank raised an error; the message is Cuboid's, or begins with :data:`NOT_OURS`."""


def agreed(action):
    """What an action returns; what is refused on one rank is refused on all."""
    result, why = None, None
    try:
        result = action()
    except cuboid.CuboidError as error:
        why = str(error)
    except Exception as error:
        why = str(error) if isinstance(error, ScriptError) else f"{NOT_OURS} {type(error).__name__}: {error}"
    whys = [None] * dist.get_world_size()
    dist.all_gather_object(whys, why)
    whys = [other for other in whys if other is not None]
    if whys:
        raise Refused(next((other for other in whys if not other.startswith(NOT_OURS)), whys[0]))
    return result


def check_changed(skipped):
    """Check that some stage has changed its part; a script that looks for it on none fails."""
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, None if skipped is None else f"{type(skipped).__name__}: {skipped}")
    if None not in everywhere:
        raise Refused(f"{SCRIPTS_LINE}: {everywhere[0]}")


def verdict(entry, layout, path, change, moment):
    """``"right"``, ``"refused: …"``, or what is wrong."""
    with contextlib.ExitStack() as stack:
        try:
            if moment == "whole":
                stack.enter_context(change.active())
            run = agreed(lambda: Run(entry, layout, path, change, moment))
            if moment == "sharded":
                check_changed(agreed(lambda: in_script(change, run.model)))
            agreed(run.start)
            if moment in ("sharded", "engine"):
                stack.enter_context(change.active())
            losses = []
            for step in range(3):
                if (moment, step) in (("engine", 0), ("later", 1)):
                    stack.enter_context(change.active())
                    check_changed(agreed(lambda: in_script(change, run.model)))
                agreed(run.check)
                with KeepFloat64():
                    losses.append(agreed(run.step))
            weights = agreed(lambda: cuboid.full_state_dict(run.model))
        except Refused as error:
            return f"refused: {error}"
    # DeepSpeed's ZeRO keeps master weights in float32.
    tolerance = 1e-6 if entry == "initialize" else 1e-9
    if dist.get_rank() > 0:
        return "right"
    # A class of the script's own may draw other weights than the one that wrote the checkpoint.
    start = path[change.tied] if entry == "load" else None
    return compared(losses, weights, plain(change, moment, start), tolerance)


def compared(losses, weights, alone, tolerance):
    wanted, expected = alone
    error = max(abs(a - b) for a, b in zip(losses, wanted, strict=True))
    if not error < tolerance:
        return f"WRONG losses: {losses}, wanted {wanted}"
    if weights.keys() != expected.keys():
        return f"WRONG weights: {sorted(weights.keys() ^ expected.keys())}"
    worst = {name: float((weights[name] - expected[name]).abs().max()) for name in weights}
    name = max(worst, key=worst.get)
    return "right" if worst[name] < tolerance else f"WRONG weights: {name} by {worst[name]:.1e}"


def plain(change, moment, start=None):
    """Losses and weights of plain transformers, from a checkpoint or new weights."""
    with contextlib.ExitStack() as stack:
        if moment == "whole":
            stack.enter_context(change.active())
        if start is None:
            model = built(change.cls, tied=change.tied)
        else:
            model = change.cls.from_pretrained(start, dtype=torch.float64).train()
        if moment == "whole":
            change.apply(model)
        losses = []
        for step in range(3):
            # A run has an optimizer before there is an engine.
            if step == 0 and moment == "engine":
                optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=RATE)
            if (moment, step) in (("sharded", 0), ("engine", 0), ("later", 1)):
                stack.enter_context(change.active())
                change.apply(model)
            if step == 0 and moment != "engine":
                optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=RATE)
            with KeepFloat64():
                loss = model(**batch(), use_cache=False).loss
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
        return losses, model.state_dict()


def verdicts(entry, layout, path, moment, names):
    return {name: verdict(entry, layout, path, CHANGES[name], moment) for name in names}


def names_for(entry, moment):
    """The changes that a script can make at a moment."""
    if moment != "whole":
        return [name for name, change in CHANGES.items() if change.of or change.code]
    return [name for name, change in CHANGES.items() if entry != "load" or not change.of]


def assert_right_or_refused(verdicts):
    """Check verdicts by name: that no change is dropped or mistaken, and that refusals name it."""
    assert {name: said for name, said in verdicts.items() if not is_right_or_refused(name, said)} == {}


def is_right_or_refused(name, said):
    if said == "right" or said.startswith(f"refused: {SCRIPTS_LINE}"):
        return True
    return said.startswith("refused: ") and NOT_OURS not in said and re.search(NAMED[name.partition(":")[0]], said)


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Checkpoints of the model, by whether its head is tied."""
    folders = {}
    for tied in (False, True):
        folders[tied] = str(tmp_path_factory.mktemp("model"))
        built(tied=tied).save_pretrained(folders[tied])
    return folders


def swept(pool, paths, entry, layout, moment, names):
    if entry == "booster":
        pytest.importorskip("colossalai.booster", reason="ColossalAI isn't installed")
    return pool.run(ranks_of(layout), verdicts, entry, layout, paths, moment, names, timeout_s=TIMEOUT_S)[0]


#: Of each kind one that nothing may drop.
FEW = [
    "hook: forward hook of a projection",
    "instance: epsilon of a norm",
    "loss: class weights",
    "head: with an adapter",
    "parametrization: of the head",
    "values: another tensor of the same shape",
    "values: in place",
]


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize(
    ("entry", "layout", "moment"),
    [
        ("shard", "1x1x2", "later"),
        pytest.param("load", "2 stages of 1x2x1", "engine", marks=pytest.mark.slow),
        pytest.param("initialize", "2x1x1", "later", marks=pytest.mark.slow),
        ("initialize", "2 stages", "engine"),
        ("booster", "1x2x1", "sharded"),
        pytest.param("booster", "2 stages", "later", marks=pytest.mark.slow),
    ],
)
def test_what_a_script_changes_is_right_or_refused(pool, paths, entry, layout, moment):
    mesh, stages = LAYOUTS[layout]
    verdicts = swept(pool, paths, entry, layout, moment, [*FEW, *(["class: block"] if moment == "later" else [])])
    assert_right_or_refused(verdicts)
    right = {name for name in FEW if name.startswith("values")}
    # Pipelines sum losses in parts, and without a mesh norms stay the model's own modules.
    right |= {"loss: class weights"} if stages == 1 else set()
    right |= {"instance: epsilon of a norm"} if mesh == (1, 1, 1) else set()
    assert {name for name, said in verdicts.items() if said == "right"} == right


MOMENTS_OF = {"shard": ("whole", "engine", "later"), "load": ("whole", "engine", "later")}


#: Changes that one pool runs. Each model has groups of processes, and groups have threads that nothing ends.
AT_ONCE = 16


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("entry", "moment"), [(e, m) for e in ENTRIES for m in MOMENTS_OF.get(e, MOMENTS)])
def test_every_change_is_right_or_refused(paths, entry, layout, moment):
    verdicts, names = {}, names_for(entry, moment)
    for first in range(0, len(names), AT_ONCE):
        with WorkerPool(ranks_of(layout)) as pool:
            verdicts |= swept(pool, paths, entry, layout, moment, names[first : first + AT_ONCE])
    assert_right_or_refused(verdicts)
