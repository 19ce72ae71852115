"""What a kind of model decides: its classes, a micro-batch's tensors, the targets of its loss, and the probe's batches.

The defaults are those of a model that is given token ids. A kind overrides what is different.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from transformers import PretrainedConfig, PreTrainedModel

from cuboid.distributed.mesh import Mesh
from cuboid.errors import CuboidError
from cuboid.models.architectures.certificate import MeshVerdict
from cuboid.models.attention.forward_context import Lengths
from cuboid.models.batch.broadcast import MicroBatch
from cuboid.models.batch.length_cases import Case
from cuboid.models.batch.local_batch import TENSORS, TOKEN_TYPES, LocalBatch, check_ids, check_tensors, take_local_batch
from cuboid.models.kinds.probe_rows import RowsOf, probe_rows, vocabulary_size
from cuboid.tensor3d.layers.whole_block import ImageSplit, LateSplit

#: The targets of all kinds: arguments of a forward with which a loss compares logits.
TARGETS = ("labels", "shift_labels", "start_positions", "end_positions")


@dataclass(frozen=True)
class ModelKind:
    """A kind of model, with what a model's config says of its head.

    Args:
        outputs: number of outputs that the head has for each label; 0 for language models.
        classes: exclusive upper limit of integer labels; None if labels aren't classes, as in regression.

    Attributes:
        name: short, for tests and tables.
        words: for error messages.
        endings: of the names of its classes in transformers.
        auto_class: transformers' class that builds a checkpoint's model.
        main_input: the argument of a forward that a model of this kind can't do without.
        targets: the targets of its loss.
        tensors: names of the tensors that a micro-batch may have, without token types; the main input comes first.
        ordinary_loss: the function in transformers with which models compute their loss; None if there is no such.
        is_language_model: whether its head has an output for each entry of the vocabulary.
        is_causal: whether positions see only earlier ones, so that a pipeline may cut sequences.
        in_pipeline: whether a pipeline takes it.
        runs_own_head: whether a pipeline's last stage computes the loss with the model's own forward, on whole
            sequences. If not, it computes a language model's loss itself.
        has_new_head: whether its head may be new, where a checkpoint is fine-tuned for another task.
        labels_each_token: whether padding can have labels.
        loss_reads_mask: whether its models' own loss may leave out what the mask hides.
        takes_positions: whether a micro-batch may have positions, by which packed sequences are told apart.
        inputs_on_mesh: what the probe tries to give a model on a mesh, the best first.
        reads_last_token: whether its head may look for the last token of each row that isn't padding.
        whole_cases: the only cases of the probe of meshes, all of whole rows; () for those of token ids.
    """

    outputs: int = 0
    classes: int | None = None

    name: ClassVar[str]
    words: ClassVar[str]
    endings: ClassVar[tuple[str, ...]] = ()
    auto_class: ClassVar[Any]
    main_input: ClassVar[str] = "input_ids"
    targets: ClassVar[tuple[str, ...]] = ("labels",)
    tensors: ClassVar[tuple[str, ...]] = TENSORS
    ordinary_loss: ClassVar[str | None] = None
    is_language_model: ClassVar[bool] = False
    is_causal: ClassVar[bool] = False
    in_pipeline: ClassVar[bool] = False
    runs_own_head: ClassVar[bool] = False
    has_new_head: ClassVar[bool] = False
    labels_each_token: ClassVar[bool] = False
    loss_reads_mask: ClassVar[bool] = False
    takes_positions: ClassVar[bool] = True
    inputs_on_mesh: ClassVar[tuple[MeshVerdict, ...]] = (
        MeshVerdict(inputs="embeddings"),
        MeshVerdict(inputs="ids"),
        MeshVerdict(inputs="only ids"),
        MeshVerdict(splits_late=True),
    )
    reads_last_token: ClassVar[bool] = False
    whole_cases: ClassVar[tuple[Case, ...]] = ()

    @classmethod
    def of(cls, config: PretrainedConfig) -> Self:  # noqa: ARG003
        """The kind with what a model's config says of it."""
        return cls()

    @classmethod
    def takes_input_of(cls, model: Any) -> bool:
        """Whether a model's class is given what this kind has rules for, and not audio, for example."""
        return bool(getattr(model, "main_input_name", "input_ids") == cls.main_input)

    @classmethod
    def auto_class_of(cls, model: Any) -> Any:  # noqa: ARG003
        """transformers' class that builds a model of this class."""
        return cls.auto_class

    def check_generation(self, arguments: Mapping[str, Any]) -> None:
        """Check the arguments of ``generate``, which are then those of forwards.

        Raises:
            UnsupportedModelError: there is no rule for one of them.
        """

    # --- targets ---

    def check(self, arguments: Mapping[str, Any]) -> None:
        """Check that the targets among a forward's arguments, if any, belong to the kind and have its shapes.

        Raises:
            CuboidError: a target has another shape, or belongs to another kind; or the ids aren't ``[B, S]``.
        """
        main = next((name for name in (self.main_input, "input_ids") if arguments.get(name) is not None), None)
        if main is None:
            return  # a missing input raises an error later
        if main == "input_ids":
            check_ids(arguments[main])
        for name in TARGETS:
            x = arguments.get(name)
            if x is None:
                continue
            if name not in self.targets:
                wanted = " and ".join(self.targets) or "no labels"
                raise CuboidError(f"{name} were given to a model for {self.words}, which takes {wanted}")
            self._check_target(name, x, arguments, main)

    def _check_target(self, name: str, x: torch.Tensor, arguments: Mapping[str, Any], main: str) -> None:
        shape = arguments[main].shape
        shapes = self._shapes(shape, is_integer=not x.is_floating_point())
        if tuple(x.shape) not in shapes:
            raise CuboidError(
                f"{name} is {list(x.shape)}, but {main} is {list(shape)}: {self.words} needs "
                + " or ".join(str(list(expected)) for expected in shapes)
            )

    def _shapes(self, input_shape: torch.Size, *, is_integer: bool) -> list[tuple[int, ...]]:  # noqa: ARG002
        """The shapes that a target may have for an input of this shape."""
        return [tuple(input_shape[:2])]

    def check_micro_batch(self, tensors: dict[str, torch.Tensor]) -> None:
        """Check the shapes and dtypes of a pipeline's micro-batch.

        Raises:
            CuboidError: they aren't as the kind needs them.
        """
        check_tensors({name: x for name, x in tensors.items() if name not in TARGETS})
        self.check(tensors)

    def for_stages(self, batch: MicroBatch, *, shifts: bool) -> MicroBatch:  # noqa: ARG002
        """A pipeline's micro-batch as its last stage needs it.

        Args:
            batch: as the user gave it.
            shifts: whether the model's own loss compares each position with the next one's label.

        Raises:
            CuboidError: a target is missing.
        """
        missing = [name for name in self.targets if batch.get(name) is None]
        if missing:
            raise CuboidError(f"a micro-batch for {self.words} needs {' and '.join(missing)}")
        return batch

    def items(self, batch: Mapping[str, Any]) -> torch.Tensor:
        """The number of tokens or rows over which the loss of a micro-batch is averaged, a tensor of no dims."""
        rows = batch[self.main_input]
        return torch.tensor(len(rows), device=rows.device)

    # --- what a forward is given ---

    def local_batch(
        self, arguments: dict[str, Any], config: PretrainedConfig, mesh: Mesh, verdict: MeshVerdict
    ) -> LocalBatch:
        """This rank's part of a micro-batch, from a forward's arguments.

        Raises:
            UnsupportedModelError: an argument isn't supported by sharded models.
            CuboidError: the shapes contradict each other.
        """
        types = (TOKEN_TYPES,) if verdict.token_types else ()
        return take_local_batch(arguments, config, mesh, inputs=verdict.inputs, types=types)

    def forward(self, model: Any, base_forward: Any, arguments: dict[str, Any]) -> Any:
        """Forward of a sharded model: of a whole micro-batch, with whole results."""
        raise NotImplementedError

    def check_base_call(self, model: Any) -> None:
        """Check that a model of this kind may have its base model, ``model``, called by itself.

        Raises:
            UnsupportedModelError: it may not.
        """

    def local_arguments(self, model: Any, batch: LocalBatch) -> dict[str, Any]:
        """The arguments of a plain class's forward for this rank's part of a micro-batch."""
        # A sharded embedding takes the whole sequence's ids and returns the rank's part. Given ids, the model's own
        # code would derive all later shapes from theirs, so look them up here and give it embeddings instead.
        tensors = dict(batch.tensors)
        if model.cuboid.verdict.inputs != "embeddings":
            return {**batch.options, **tensors, "use_cache": False}
        if batch.cache is not None:
            tensors |= {"past_key_values": batch.cache}
        embeddings = model.get_input_embeddings()(tensors.pop("input_ids"))
        return {**batch.options, **tensors, "inputs_embeds": embeddings, "use_cache": batch.cache is not None}

    def lengths_of(self, batch: LocalBatch, *, makes_masks: bool) -> Lengths:
        """The lengths of a micro-batch's sequences, for the functions that make masks."""
        return Lengths(batch.length, batch.padded, makes_masks=makes_masks, cache=batch.cache)

    def split_of_activations(self, mesh: Mesh, verdict: MeshVerdict) -> LateSplit | ImageSplit | None:
        """What splits activations at the first layer; None if the embedding does."""
        return LateSplit(mesh) if verdict.splits_late else None

    def inputs_of(self, model: Any, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:  # noqa: ARG002
        """The arguments of a forward that computes a micro-batch's outputs without a loss."""
        return {name: x for name, x in batch.items() if name not in TARGETS}

    def options_of(self, model: Any) -> dict[str, Any]:
        """The arguments of a plain model's forward besides a micro-batch, for the same result as on a mesh."""
        return {"use_cache": False} if hasattr(model.config, "use_cache") else {}

    # --- probes ---

    @classmethod
    def probe_config(
        cls,
        small: PretrainedConfig,
        make: Callable[[PretrainedConfig], PreTrainedModel],  # noqa: ARG003
    ) -> PretrainedConfig:
        """The config that the probe of meshes takes, from that of a small model.

        Raises:
            CannotProbe: there is none.
        """
        return small

    def micro_batch(self, case: Case, model: Any, rows_of: RowsOf, generator: torch.Generator) -> MicroBatch:
        """A random micro-batch with the targets of the kind."""
        raise NotImplementedError

    def probe_batch(
        self, case: Case, model: PreTrainedModel, *, has_types: bool = False, has_labels: bool = False
    ) -> MicroBatch:
        """A micro-batch for a small model."""
        generator = torch.Generator().manual_seed(case.length + 1)

        def rows_of(case: Case, _: int) -> MicroBatch:
            text = model.config.get_text_config()
            batch = probe_rows(case, vocabulary_size(model.config), has_labels=has_labels)
            pad = getattr(text, "pad_token_id", None)
            if pad is not None and "attention_mask" in batch:
                # Some models recognize padding by its ids.
                batch["input_ids"][batch["attention_mask"] == 0] = pad
            if has_types:
                shape, count = batch["input_ids"].shape, model.config.type_vocab_size
                batch[TOKEN_TYPES] = torch.randint(0, count, shape, generator=generator)
            return batch

        return self.micro_batch(case, model, rows_of, generator)

    def mesh_choices(self, *, has_own_loss: bool) -> list[MeshVerdict]:
        """Ways to run a model with its layers split, which the probe tries in this order.

        Args:
            has_own_loss: whether a plain model computes its loss without its ``loss_function``.
        """
        return [replace(way, **head) for way in self.inputs_on_mesh for head in self._head_choices(has_own_loss)]

    def _head_choices(self, has_own_loss: bool) -> list[dict[str, Any]]:  # noqa: ARG002
        """What those ways have of the head, as fields of a verdict."""
        return [{"head": "labels"}, {"head": "whole"}]

    def probe_loss(self, output: Any, batch: MicroBatch) -> torch.Tensor:  # noqa: ARG002
        """A scalar of a probe's output whose gradients are compared: the model's own loss, if it has one."""
        loss: torch.Tensor = output.loss
        return loss


def counts_positions(model: PreTrainedModel) -> bool:
    """Whether a model counts positions by itself, because its forward takes none."""
    return "position_ids" not in inspect.signature(type(model.base_model).forward).parameters


def takes_token_types(model: PreTrainedModel) -> bool:
    """Whether a model has a table of token types, and its forward takes them."""
    parameters = inspect.signature(type(model.base_model).forward).parameters
    return "token_type_ids" in parameters and bool(getattr(model.config, "type_vocab_size", 0))
