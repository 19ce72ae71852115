"""What is mixed into the classes of models on a mesh whose towers compute features of images or of audio."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from cuboid.errors import CuboidError
from cuboid.models.architectures.media import AUDIO, IMAGES, Medium
from cuboid.models.attention.forward_context import WHOLE_IMAGES, forward_context, knowing
from cuboid.models.batch.row_media import RankMedia
from cuboid.models.kinds.media.probe_images import features_of
from cuboid.models.kinds.sharding import Sharding
from cuboid.tensor3d.layers.whole_block import KeptWhole, activation_split, on_whole_activations, unsharded_block

_DIMS_OF_FEATURES = 2
#: Features that are added to hidden states between layers of the text model, beside those among the embeddings.
_BETWEEN_LAYERS = "deepstack_features"


class ComputesImages:
    """Mixed into the class of a sharded base model that takes images, in front of the architecture's."""

    def get_image_features(self, *args: Any, **kwargs: Any) -> Any:
        """The features of the images in this rank's rows, which the model's own forward asks for."""
        return _features_of_rank(self, IMAGES, super().get_image_features, args, kwargs)  # type: ignore[misc]


class ComputesAudio:
    """The same of one that takes audio."""

    def get_audio_features(self, *args: Any, **kwargs: Any) -> Any:
        """The features of the clips in this rank's rows, which the model's own forward asks for."""
        return _features_of_rank(self, AUDIO, super().get_audio_features, args, kwargs)  # type: ignore[misc]


def _features_of_rank(
    model: Any, medium: Medium, compute: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """What a base model's own method returns, but only of the images or clips in this rank's rows."""
    with ExitStack() as stack:
        if isinstance(model, KeptWhole):
            # A parameter of the base model itself, such as what ends rows of patches.
            stack.enter_context(unsharded_block(model, alone=True))
        media = next((one for one in forward_context().media if one.medium is medium), None)
        if media is None:
            return compute(*args, **kwargs)
        # A tower's attention has masks of its own.
        stack.enter_context(knowing(lengths=WHOLE_IMAGES, packing=None))
        if media.spare is None:
            output = compute(*args, **kwargs)
            return output if media.spans is None else _cut_features(medium, output, media, media.spans)
        arguments = inspect.signature(compute).bind(*args, **kwargs).arguments
        named = {**arguments.pop("kwargs", {}), **arguments}
        named = {name: media.spare.get(name, x) for name, x in named.items()}
        # None of them, but with their gradients, which are zeros: backward unshards the tower on all ranks as well.
        return _cut_features(medium, compute(**named), None, ())


class AddsFeatures:
    """Mixed into the class of a text model that adds features of images to hidden states between layers."""

    cuboid: Sharding

    @staticmethod
    def belongs_to(module: nn.Module) -> bool:
        """Whether a module is such a text model."""
        return hasattr(type(module), "_deepstack_process")

    def _deepstack_process(self, *args: Any, **kwargs: Any) -> Any:
        """Add features ``[placeholders, H]`` to whole hidden states, of which this rank gets and returns its part."""
        compute, mesh = super()._deepstack_process, self.cuboid.mesh  # type: ignore[misc]
        return on_whole_activations(type(self).__name__, activation_split(mesh), compute, args, kwargs)


def _cut_features(medium: Medium, output: Any, media: RankMedia | None, spans: Sequence[tuple[int, int]]) -> Any:
    """Of the features of images or clips, in place, those of some spans, of all of them one after the other.

    Raises:
        CuboidError: there aren't as many as ``media`` have placeholders.
    """

    def cut(features: Any) -> Any:
        is_one = isinstance(features, torch.Tensor)
        if media is not None and media.of_clips:
            return torch.cat([features[start:end] for start, end in (*spans, (0, 0))])
        if is_one and not spans:
            return features[:0]
        flat = torch.cat([x.reshape(-1, x.shape[-1]) for x in ((features,) if is_one else features)])
        if media is not None and len(flat) != media.placeholders:
            raise CuboidError(
                f"the {medium.nouns} have {len(flat)} features, and input_ids have {media.placeholders} placeholders "
                "for them; give the model what its processor makes of them and of the text"
            )
        taken = torch.cat([flat[start:end] for start, end in (*spans, (0, 0))])
        if not is_one:
            return type(features)((taken,))
        return taken.unsqueeze(1) if features.dim() > _DIMS_OF_FEATURES else taken

    features = output[features_of(output)]
    taken = cut(features)
    for name in [name for name, x in output.items() if x is features]:
        output[name] = taken
    if getattr(output, _BETWEEN_LAYERS, None) is not None:
        output[_BETWEEN_LAYERS] = type(output[_BETWEEN_LAYERS])(map(cut, output[_BETWEEN_LAYERS]))
    return output
