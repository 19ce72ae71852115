"""Assign each module of a Hugging Face model its role on the mesh.

A module of a block gets its role from the model's own ``base_model_tp_plan``, else from :mod:`.plans`; embeddings, head
and norms are recognized without a plan. A block that has a module without a role is computed whole: every rank of
sequence × hidden gathers its input and its weights, which stay sharded in between, and computes all of it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from cuboid.errors import UnsupportedModelError
from cuboid.models.architectures.attention_heads import HeadCounts
from cuboid.models.architectures.certificate import HeadPlan
from cuboid.models.architectures.expert_form import expert_form
from cuboid.models.architectures.media import AUDIO, FRAMES, IMAGES
from cuboid.models.architectures.norm_formula import NormFormula, formula_once, may_normalize
from cuboid.models.architectures.plans import COMMON, HEADS, LATENT, PLANS, Heads
from cuboid.tensor3d.experts.sharded_experts import ExpertForm

RoleKind = Literal[
    "embedding",
    "up",
    "down",
    "latent",
    "from latent",
    "experts",
    "router",
    "head",
    "labels",
    "norm",
    "bias of heads",
    "gathered",
    "per head",
    "whole",
    "inside",
    "beside tower",
    "tied",
]


@dataclass(frozen=True)
class Role:
    """The role of a module.

    Args:
        kind: ``"up"``, ``"down"``: a projection into a block, or out of it.
            ``"latent"``, ``"from latent"``: a projection to, or from, the few features of multi-latent attention.
            ``"experts"``: all experts of a mixture.
            ``"router"``: a module beside experts that computes a few numbers from all features of a token.
            ``"labels"``: a head of few outputs, which all ranks get whole.
            ``"beside tower"``: a base model with parameters of its own, which its code adds to features of images.
            ``"tied"``: a module around the head, whose parameters are the head's, or cut like its bias.
            ``"gathered"``: a norm of each head by itself, or of latents, with the same parameters for all.
            ``"per head"``: attention itself, with a number for each head, such as a sink.
            ``"bias of heads"``: a table whose rows have a number for each head, such as a bias by relative position.
            ``"whole"``: a module that is computed whole with all modules inside it, whose kind is ``"inside"``.
        heads: which attention heads the out features are, if any; for a norm, whose features it normalizes.
        parts: number of projections that are concatenated in the out features.
        norm: the formula of a norm with parameters.
        experts: how the experts' parameters are stored.
        width: for a router, the features of a token.
        alone: whether the layer itself calls it, on a part of the sequence.
        late: whether it may run before activations are split; see :class:`MeshVerdict`.
        everywhere: whether every rank of the mesh gets the same whole input, from a base model whose output is
            gathered.
        tower: whether it is part of what computes features of images, of which all ranks of sequence × hidden get the
            same.
    """

    kind: RoleKind
    heads: Heads | None = None
    parts: int = 1
    norm: NormFormula | None = None
    experts: ExpertForm | None = None
    width: int = 0
    alone: bool = False
    late: bool = False
    everywhere: bool = False
    tower: bool = False


def find_roles(
    model: PreTrainedModel, whole_blocks: Collection[str] = (), *, splits_late: bool = False, head: HeadPlan = "split"
) -> dict[str, Role]:
    """Roles by module name: of all modules that own parameters or normalize, and of blocks that are computed whole.

    Args:
        model: on any device.
        whole_blocks: blocks to compute whole in any case, by their names inside their layer, such as
            ``"self_attn"``; ``""`` for whole layers.
        splits_late: whether activations are whole up to the first layer.
        head: how modules after the base model are computed.

    Raises:
        UnsupportedModelError: names a module that has no rule and can't be computed whole.
    """
    finder = _Finder(model, frozenset(whole_blocks), splits_late, head)
    roles: dict[str, Role] = {}
    for block, members in finder.blocks().items():
        roles.update(finder.block_roles(block, members))
    order = {name: place for place, (name, _) in enumerate(model.named_modules())}
    return dict(sorted(roles.items(), key=lambda item: order[item[0]]))


def split_blocks(model: PreTrainedModel) -> list[str]:
    """Names, inside their layer, of the blocks that are split, but could be computed whole."""
    finder = _Finder(model)
    blocks: dict[str, None] = {}
    for name, role in find_roles(model).items():
        if role.kind in ("up", "down", "experts") and not role.alone:
            blocks.setdefault(finder.inside_of_layer(finder.block_of(name)), None)
    return list(blocks)


def blocks_computed_whole(model: PreTrainedModel, whole_blocks: Collection[str] = ()) -> tuple[str, ...]:
    """Names, inside their layer, of all blocks of layers that are computed whole; ``""`` for whole layers."""
    finder = _Finder(model, frozenset(whole_blocks))
    layers = layer_names(model)
    blocks: dict[str, None] = {}
    for name, role in find_roles(model, whole_blocks).items():
        if role.kind == "whole" and (name in layers or any(name.startswith(f"{layer}.") for layer in layers)):
            blocks.setdefault(finder.inside_of_layer(name), None)
    return tuple(blocks)


def layer_names(model: nn.Module, *, of_towers: bool = False) -> list[str]:
    """Names of the children of the outermost module lists: decoder layers and the like; or those of towers alone."""
    towers = tower_names(model) if isinstance(model, PreTrainedModel) else ()
    layers: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(name.startswith(f"{layer}.") for layer in layers):
            layers += [f"{name}.{child}" for child, _ in module.named_children()]
    return [layer for layer in layers if any(layer.startswith(f"{tower}.") for tower in towers) is of_towers]


def tower_names(model: PreTrainedModel) -> tuple[str, ...]:
    """Names of the modules that compute features of images or audio, beside the language model that takes these."""
    base = model.base_model
    if model.main_input_name == FRAMES and model.config.is_encoder_decoder:
        encoder = model.get_encoder()
        return tuple(name for name, module in model.named_modules() if module is encoder)
    if not hasattr(base, IMAGES.compute) and not hasattr(base, AUDIO.compute):
        return ()
    # In Fuyu, for example, patches are tokens, without a tower.
    if takes_pixels(model) or not any(medium.is_computed_by(type(model), type(base)) for medium in (IMAGES, AUDIO)):
        return ()
    embedding = model.get_input_embeddings()
    prefix = "" if base is model else f"{model.base_model_prefix}."
    parts = [name for name, part in base.named_children() if not any(part_ is embedding for part_ in part.modules())]
    return tuple(f"{prefix}{name}" for name in parts) if len(parts) < len(list(base.children())) else ()


def takes_pixels(model: PreTrainedModel) -> bool:
    """Whether a model's input is images, which have no embedding table."""
    return model.main_input_name == "pixel_values"


def token_embeddings(model: PreTrainedModel) -> list[nn.Module]:
    """A model's token embeddings; an encoder and a decoder may have one each, with the same weight."""
    if takes_pixels(model):
        # The module that embeds patches is no table.
        return []
    input_embeddings: nn.Module | None = None
    with suppress(AttributeError):
        input_embeddings = model.get_input_embeddings()
    if input_embeddings is None:
        return []
    embeddings = {input_embeddings: None}
    if model.config.is_encoder_decoder:
        for part in model.modules():
            with suppress(NotImplementedError):  # A part that has none.
                # An encoder of audio begins with a convolution.
                if isinstance(part, PreTrainedModel) and part.main_input_name == "input_ids":
                    embeddings[part.get_input_embeddings()] = None
        # The embedding that their weights are tied to counts, even if no code calls it.
        ties: dict[str, str] = model.all_tied_weights_keys
        tied = [model.get_submodule(name.rpartition(".")[0]) for pair in ties.items() for name in pair]
        embeddings.update(dict.fromkeys(module for module in tied if isinstance(module, nn.Embedding)))
    return list(embeddings)


def output_embeddings(model: PreTrainedModel) -> nn.Module | None:
    """A language model's head; None for other models, and for a pipeline stage without the module that has the head."""
    with suppress(AttributeError):
        head: nn.Module | None = model.get_output_embeddings()
        return head
    return None


class _Finder:
    def __init__(
        self,
        model: PreTrainedModel,
        whole_blocks: frozenset[str] = frozenset(),
        splits_late: bool = False,
        head: HeadPlan = "split",
    ) -> None:
        self._model, self._whole_blocks, self._splits_late, self._head = model, whole_blocks, splits_late, head
        self._modules, self._heads = dict(model.named_modules()), HeadCounts.of(model.config)
        self._layers = set(layer_names(model))
        self._towers = tower_names(model)
        self._tower_layers = layer_names(model, of_towers=True)
        plan: dict[str, str] = {}
        for part in planned_parts(model.config):
            # The class's, which is what certification looks at: configs may say something else about themselves.
            plan |= PLANS.get(part.model_type, {}) | (getattr(type(part), "base_model_tp_plan", None) or {})
        # Plans name modules relative to the base model, which may have a prefix in the model.
        self._styles = [
            (re.compile(r"(?:.+\.)?" + re.escape(pattern).replace(r"\*", r"[^.]+")), style)
            for pattern, style in plan.items()
        ]
        self._ends: dict[nn.Module | None, str] = dict.fromkeys(token_embeddings(model), "embedding")
        self._ends[output_embeddings(model)] = "head"
        self._formulas: dict[Any, NormFormula | None] = {}

    def blocks(self) -> dict[str, list[str]]:
        """The modules that need a role, by the name of the block that is computed as one."""
        blocks: dict[str, list[str]] = {}
        towers: dict[str, list[str]] = {}
        for name, module in self._modules.items():
            if _owns(module) or (may_normalize(module) and not _owns(module, inside=True)):
                is_of_tower = self._is_in_tower(name)
                (towers if is_of_tower else blocks).setdefault(self.block_of(name), []).append(name)
        # Modules inside a layer that is a block belong to it, and those beside a pooler's linear layer to the pooler.
        outer = [block for block, members in blocks.items() if block in self._layers or block not in members]
        if takes_pixels(self._model):
            # Image embeddings own parameters, such as a class token, beside modules; the outermost module is the block.
            # It comes last in ``outer``, so that it wins in ``inner``.
            beside = [block for block in blocks if block not in outer and not self._inside_layers(block)]
            outer = sorted([*outer, *beside], key=len, reverse=True)
        inner = {name: layer for layer in outer for name in blocks if name.startswith(f"{layer}.")}
        for name, layer in inner.items():
            blocks[layer] += blocks.pop(name)
        return blocks | towers

    def block_of(self, name: str) -> str:
        """The block of a module: the child of a layer that contains it or is it, else the layer."""
        parts = name.split(".")
        prefixes = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
        if self._is_in_tower(name):
            return next(prefix for prefix in prefixes if self._is_tower_block(prefix))
        layer = next((prefix for prefix in prefixes if prefix in self._layers), None)
        if layer is None:
            # Outside of layers it is the module itself or, if it has no rule, as in a pooler, its parent.
            is_of_head = self._head != "split" and self._is_behind_base(name)
            if is_of_head or self._role(name, is_block=True) is not None:
                return name
            parent = name.rpartition(".")[0]
            inner = set(self._modules[parent].modules())
            ends = (self._modules[layer] for layer in self._layers), (end for end in self._ends if end is not None)
            # A parent that contains layers, embeddings or the head is the model or its base model, and no block.
            return parent if parent and inner.isdisjoint(itertools.chain(*ends)) else name
        if "" in self._whole_blocks:
            return layer
        for end in range(layer.count(".") + 2, len(parts) + 1):
            block = ".".join(parts[:end])
            # A module list has no forward, so it is no block.
            is_list = isinstance(self._modules[block], nn.ModuleList | nn.ModuleDict)
            if not is_list and not (parts[end - 1].isdigit() and self._is_sublayer(block)):
                return block
        return layer

    def _is_in_tower(self, name: str) -> bool:
        return any(f"{name}.".startswith(f"{tower}.") for tower in self._towers)

    def _is_tower_block(self, name: str) -> bool:
        """Whether a module is unsharded by itself: a tower's layer, or what has no layers inside.

        Modules with parameters beside their layers, such as a class token, are unsharded with all of these.
        """
        if not self._is_in_tower(name):
            return False
        has_layers = any(layer.startswith(f"{name}.") for layer in self._tower_layers)
        module = self._modules[name]
        is_list = isinstance(module, nn.ModuleList | nn.ModuleDict)
        # Code around a table of constants may read its weight rather than call it.
        has_table = any(isinstance(part, nn.Embedding) and not part.weight.requires_grad for part in module.children())
        return not is_list and (not has_layers or has_table or _owns(module))

    def _is_sublayer(self, name: str) -> bool:
        """Whether a member of a list in a layer is just a norm and one block in a residual connection, as in T5."""
        children = [module for module in self._modules[name].children() if _owns(module, inside=True)]
        blocks = [module for module in children if not may_normalize(module)]
        return len(children) == 2 and len(blocks) == 1 and not _owns(blocks[0]) and not _owns(self._modules[name])

    def _is_behind_base(self, name: str) -> bool:
        """Whether a module comes after the base model."""
        prefix = self._model.base_model_prefix
        return name != prefix and not name.startswith(f"{prefix}.")

    def inside_of_layer(self, block: str) -> str:
        """A block's name inside its layer, with ``*`` for numbers."""
        layer = next((layer for layer in self._layers if block.startswith(f"{layer}.")), block)
        return re.sub(r"\.\d+", ".*", block[len(layer) + 1 :])

    def block_roles(self, block: str, members: list[str]) -> dict[str, Role]:
        """Roles of the modules of one block."""
        if self._is_in_tower(block):
            return {**dict.fromkeys(members, Role("inside")), block: Role("whole", tower=True)}
        if self._towers and self._modules[block] is self._model.base_model:
            return {block: Role("beside tower")}
        if self._head != "split" and self._is_behind_base(block):
            return {name: self._head_role(name) for name in members}
        if self._is_around_head(block):
            return {block: Role("tied")}
        is_late = self._splits_late and not self._inside_layers(block) and block not in self._layers
        if is_late and self._modules[block] not in self._ends:
            return {**dict.fromkeys(members, Role("inside")), block: Role("whole", late=True)}
        is_whole = block in self._layers
        if self._whole_blocks and self._inside_layers(block):
            is_whole |= self.inside_of_layer(block) in self._whole_blocks
        if not is_whole:
            roles = {name: self._role(name, is_block=name == block) for name in members}
            if any(role is not None and role.kind == "experts" for role in roles.values()):
                roles = self._with_routers(block, roles)
            known = {name: role for name, role in roles.items() if role is not None}
            if len(known) == len(members) and self._fits_together(block, known):
                return known
        module = self._modules[block]
        if module in self._ends:
            raise UnsupportedModelError(f"{block!r} is a {type(module).__name__}, for which there is no rule on a mesh")
        return {**dict.fromkeys(members, Role("inside")), block: Role("whole")}

    def _with_routers(self, block: str, roles: dict[str, Role | None]) -> dict[str, Role | None]:
        """In a block with experts, turn modules without a role that take all features of a token into routers."""
        if any("jitter" in name and isinstance(x, float) and x > 0 for name, x in vars(self._modules[block]).items()):
            # The block's own code multiplies each element of its input by a random number of its own: no rule for that.
            return dict.fromkeys(roles)
        width = self._model.config.get_text_config().hidden_size
        with_routers: dict[str, Role | None] = {}
        for name, role in roles.items():
            shapes = [parameter.shape for parameter in self._modules[name].parameters(recurse=False)]
            is_router = role is None and any(len(shape) == 2 and shape[-1] == width for shape in shapes)
            with_routers[name] = Role("router", width=width) if is_router else role
        return with_routers

    def _head_role(self, name: str) -> Role:
        if self._head == "whole":
            return Role("whole", everywhere=True)
        if type(self._modules[name]) is not nn.Linear:
            kind = type(self._modules[name]).__name__
            raise UnsupportedModelError(f"{name!r} is a {kind}, which isn't a head of a few outputs")
        return Role("labels")

    def _fits_together(self, block: str, known: Mapping[str, Role]) -> bool:
        """Whether a block has the key/value heads in the model's config, in which its layers may differ; and both "up"
        and "down" projections or neither, since features are sharded in between.

        In some architectures these two are in consecutive blocks of a layer.
        """
        counts, into, out = self._heads, dict[str, int](), dict[str, dict[str, int]]()
        for name, role in known.items():
            (parent, _, leaf), module = name.rpartition("."), self._modules[name]
            if role.kind == "down":
                into[parent] = module.nx if isinstance(module, Conv1D) else module.in_features  # type: ignore[assignment]
            elif role.kind == "up" and role.heads == "key_value":
                count = module.nf if isinstance(module, Conv1D) else module.out_features
                out.setdefault(parent, {})[leaf] = count  # type: ignore[assignment]
        for parent, features in out.items():
            # Ranks that share key/value heads find these by the features of a head.
            if counts.key_value < counts.query and {*features.values()} != {counts.key_value * counts.dim}:
                return False
            # For each query head, attention's output has the features of a value head. Those of keys may be others.
            values = {count for leaf, count in features.items() if leaf.startswith("v")} or {*features.values()}
            if parent in into and {count * counts.query for count in values} != {into[parent] * counts.key_value}:
                return False
        kinds = _projections(known)
        missing = {"up", "down"} - kinds
        if not kinds or not missing:
            return True
        layer = block.rpartition(".")[0]
        return any(_projections(other) == missing for other in self._others(layer, block))

    def _others(self, layer: str, block: str) -> Iterator[dict[str, Role]]:
        """Roles in a layer's other blocks, without those that must be whole or have a module without a role."""
        for name, module in self._modules[layer].named_children():
            other = f"{layer}.{name}"
            if other == block or self.inside_of_layer(other) in self._whole_blocks:
                continue
            owners = [f"{other}.{path}" if path else other for path, inner in module.named_modules() if _owns(inner)]
            roles = {path: self._role(path, is_block=path == other) for path in owners}
            known = {path: role for path, role in roles.items() if role is not None}
            if len(known) == len(roles):
                yield known

    def _is_around_head(self, name: str) -> bool:
        head = output_embeddings(self._model)
        module = self._modules[name]
        if head is None or module is head or not any(inner is head for inner in module.modules()):
            return False
        heads = {id(parameter) for parameter in head.parameters()}
        # While a model is being loaded, parameters that its config ties are still separate.
        ties: dict[str, str] = self._model.all_tied_weights_keys
        sources = [source for target, source in ties.items() if self._modules.get(target.rpartition(".")[0]) is head]
        heads |= {id(self._model.get_parameter(source)) for source in sources}
        # RoBERTa's has a bias that isn't used unless it is tied.
        like_bias = None if type(head) is not nn.Linear else (head.out_features,)
        parameters = list(module.parameters(recurse=False))
        return bool(parameters) and all(id(one) in heads or one.shape == like_bias for one in parameters)

    def _inside_layers(self, name: str) -> bool:
        return any(name.startswith(f"{layer}.") for layer in self._layers)

    def _role(self, name: str, *, is_block: bool) -> Role | None:
        module = self._modules[name]
        if isinstance(module, nn.Embedding) and (module.max_norm or module.scale_grad_by_freq or module.sparse):
            raise UnsupportedModelError(f"{name!r}: no rule for max_norm, scale_grad_by_freq or sparse embeddings")
        if module in self._ends:
            end = self._ends[module]
            if end == "embedding":
                return Role("embedding", late=self._splits_late) if isinstance(module, nn.Embedding) else None
            return Role("head") if type(module) is nn.Linear else None
        leaf = name.rpartition(".")[2]
        if isinstance(module, nn.Embedding):
            if not self._inside_layers(name):
                return Role("embedding")
            is_of_heads = type(module) is nn.Embedding and module.embedding_dim == self._heads.query
            return Role("bias of heads") if is_of_heads else None
        if type(module) in (nn.Linear, Conv1D):
            return self._linear(name, leaf, alone=is_block) if self._inside_layers(name) else None
        form = expert_form(module, getattr(self._model.config.get_text_config(), "num_experts_per_tok", None))
        if form is not None:
            return Role("experts", experts=form) if self._inside_layers(name) else None
        formula = formula_once(module, self._formulas)
        if formula is None:
            return Role("per head") if is_block and self._has_per_head_parameters(module) else None
        if is_block or self._is_behind_down(name):
            return Role("norm", norm=formula)
        if not _owns(module):
            return Role("gathered")
        if self._is_gathered(name):
            return Role("gathered", norm=formula)
        heads = self._normed_heads(name)
        return Role("norm", heads, norm=formula) if heads is not None and formula.kind == "rms" else None

    def _is_behind_down(self, name: str) -> bool:
        """Whether a norm inside a block follows its "down" projection, so that it normalizes hidden features."""
        parent = name.rpartition(".")[0]
        linears = [
            f"{parent}.{child}" for child, x in self._modules[parent].named_children() if type(x) in (nn.Linear, Conv1D)
        ]
        roles = [self._role(linear, is_block=False) for linear in linears] if self._inside_layers(name) else []
        return len(roles) == 1 and roles[0] is not None and roles[0].kind == "down"

    def _linear(self, name: str, leaf: str, *, alone: bool) -> Role | None:
        common = COMMON.get(".".join(name.split(".")[-2:])) or COMMON.get(leaf)
        style = next((style for regex, style in self._styles if regex.fullmatch(name)), common)
        if leaf in LATENT and type(self._modules[name]) is nn.Linear:
            return Role("latent") if LATENT[leaf] == "latent" else Role("from latent", "query")
        match = re.fullmatch(
            r"(packed_colwise|colwise|rowwise)(?:_gather_output|_split_input)?(?:_(\d+))?", style or ""
        )
        if match is None:
            return None
        if match[1] == "rowwise":
            return Role("down", alone=alone)
        parts = int(match[2] or 2) if match[1] == "packed_colwise" or leaf == "gate_up_proj" else 1
        return Role("up", HEADS.get(leaf), parts, alone=alone)

    def _is_gathered(self, name: str) -> bool:
        """Whether a norm inside a block normalizes each head by itself, or latents, the input of a projection beside
        it.
        """
        sizes = [len(parameter) for parameter in self._modules[name].parameters()]
        beside = self._modules[name.rpartition(".")[0]].named_children()
        return {*sizes} == {self._heads.dim} or any(
            isinstance(other, nn.Linear) and sizes == [other.in_features]
            for child, other in beside
            if LATENT.get(child) == "from_latent"
        )

    def _has_per_head_parameters(self, module: nn.Module) -> bool:
        """Whether an attention module has parameters of its own, all with one number for each head."""
        heads = self._heads.query
        shapes = [parameter.shape for parameter in module.parameters(recurse=False)]
        has_queries = any(HEADS.get(name) == "query" for name, _ in module.named_children())
        return has_queries and set(shapes) == {(heads,)}

    def _normed_heads(self, name: str) -> Heads | None:
        """The heads of which a norm inside a block spans all features; None if there are no such heads.

        They are those of a projection whose name has the same initial, as ``q_norm`` and ``q_proj``.
        """
        parent, _, leaf = name.rpartition(".")
        counts = self._heads
        sizes: dict[Heads, int] = {"query": counts.query * counts.dim, "key_value": counts.key_value * counts.dim}
        beside = [child for child, _ in self._modules[parent].named_children() if child[0] == leaf[0]]
        projected = {HEADS.get(child) for child in beside}
        lengths = {len(parameter) for parameter in self._modules[name].parameters()}
        return next((heads for heads, size in sizes.items() if heads in projected and lengths == {size}), None)


def _projections(roles: Mapping[str, Role]) -> set[str]:
    """Which of "up" and "down" occur among some roles."""
    kinds = {"up" if role.kind == "from latent" else str(role.kind) for role in roles.values() if not role.alone}
    return kinds & {"up", "down"}


def planned_parts(config: PretrainedConfig) -> tuple[PretrainedConfig, PretrainedConfig]:
    """The configs whose types may have plans: the text model's, and the whole model's."""
    try:
        return config.get_text_config(), config
    except ValueError:  # several text configs
        return config, config


def _owns(module: nn.Module, *, inside: bool = False) -> bool:
    """Whether a module has parameters of its own; with ``inside``, or in modules inside it."""
    return any(True for _ in module.parameters(recurse=inside))
