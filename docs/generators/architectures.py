"""Probe every causal language model of the installed transformers, and write what came of it: the table that Cuboid
looks an architecture up in before it probes it itself, docs/architectures.md and docs/data/architectures.csv.

Without ``--probe``, which takes minutes for all of them, only the page is written, from the table as it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MASKED_IMAGE_MODELING_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_FOR_QUESTION_ANSWERING_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
)

from cuboid.errors import UnsupportedModelError
from cuboid.models.architectures.certificate import MeshVerdict
from cuboid.models.certification.certificates import (
    SOURCES_TABLE,
    TABLE,
    certified_files,
    digest_of,
    entry_of,
    features_of,
    find_out,
    plan_digests,
)
from cuboid.models.certification.code_identity import code_of
from cuboid.models.certification.default_models import MROPE, default_config, own_part
from cuboid.models.certification.mesh_certificates import MESH_TABLE, written_verdict
from cuboid.models.certification.mesh_check import check_meshes
from cuboid.models.certification.sides import small_for_probe
from cuboid.models.kinds.media.with_text import ImagesWithText
from cuboid.models.kinds.probe_rows import CannotProbe
from cuboid.models.kinds.registry import check_class
from generators.architecture_rows import Row, common, counts, rows
from generators.marked import comma_separated

_ROPE = {"rope_theta": 10000.0}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_ROPES: dict[str, dict[str, Any]] = {
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, **_ROPE},
    "linear": {"rope_type": "linear", "factor": 2.0, **_ROPE},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048, **_ROPE},
    "llama3": {**_LLAMA3, "original_max_position_embeddings": 8192, **_ROPE},
    "llama3, factor 32": {**_LLAMA3, "factor": 32.0, "original_max_position_embeddings": 8192, **_ROPE},
}


def _longrope(half: int) -> dict[str, Any]:
    """For heads with ``2 * half`` rotated features."""
    factors = {"long_factor": [4.0] * half, "short_factor": [1.0] * half}
    return {"rope_type": "longrope", "original_max_position_embeddings": 4096, **factors, **_ROPE}


#: Its embedding gets no gradient from the input, and masks and losses leave it out.
_PAD = {"pad_token_id": 0}
_TURNS = ["sliding_attention", "full_attention"]
#: So low that they affect most scores and logits.
_LOW_CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
_GROUPED_PAD = {"num_key_value_heads": 8, **_PAD}
#: By model type, what real configs and the tests' differ in from the defaults, by what the page calls it.
FLAVOURS: dict[str, dict[str, dict[str, Any]]] = {
    "llama": {
        "tied": {"tie_word_embeddings": True},
        "grouped": {"num_key_value_heads": 8},
        "grouped, tied": {"num_key_value_heads": 8, "tie_word_embeddings": True},
        "biases": {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 8},
        **{f"rope {name}": {"rope_parameters": rope, "num_key_value_heads": 8} for name, rope in _ROPES.items()},
        "rope longrope": {"rope_parameters": _longrope(64), "num_key_value_heads": 8},
        "padding token": _PAD,
        "grouped, padding token": _GROUPED_PAD,
        "grouped, tied, padding token": {"tie_word_embeddings": True, **_GROUPED_PAD},
        "biases, padding token": {"attention_bias": True, "mlp_bias": True, **_GROUPED_PAD},
        "biases of attention": {"attention_bias": True},
        "tied, padding token": {"tie_word_embeddings": True, **_PAD},
        "padding token, eager": _PAD,
        "grouped, padding token, eager": _GROUPED_PAD,
    },
    "qwen2": {
        "grouped": {"num_key_value_heads": 8},
        "tied": {"num_key_value_heads": 8, "tie_word_embeddings": True},
        "grouped, padding token": _GROUPED_PAD,
    },
    "qwen3": {
        "grouped": {"num_key_value_heads": 8},
        "tied": {"num_key_value_heads": 8, "tie_word_embeddings": True},
        "tied, padding token": {"tie_word_embeddings": True, **_GROUPED_PAD},
    },
    "deepseek_v3": {"one group of experts, padding token": {"n_group": 1, "topk_group": 1, **_PAD}},
    "qwen3_moe": {"padding token": {"head_dim": 128, **_PAD}},
    "mistral": {
        "no window": {"sliding_window": None},
        "padding token": _PAD,
        "no window, padding token": {"sliding_window": None, **_PAD},
        "padding token, eager": _PAD,
        "no window, padding token, eager": {"sliding_window": None, **_PAD},
    },
    "mixtral": {
        "window": {"sliding_window": 4096},
        "padding token": _PAD,
        "window, padding token": {"sliding_window": 4096, **_PAD},
        "router losses": {"output_router_logits": True},
        "router losses, padding token": {"output_router_logits": True, **_PAD},
    },
    "bart": {"decoder alone": {"is_decoder": True}},
    "gpt_neox": {"padding token": _PAD, "eager": {}},
    "gemma2": {
        "eager": {},
        "low caps, eager": _LOW_CAPS,
        "2 layers, low caps, eager": {"num_hidden_layers": 2, **_LOW_CAPS},
    },
    "gemma3_text": {
        "2 layers": {"layer_types": _TURNS, "num_hidden_layers": 2},
        "in turns": {"layer_types": 2 * _TURNS, "num_hidden_layers": 4},
    },
    "phi3": {"rope longrope": {"rope_parameters": _longrope(48)}},
    "falcon": {"ALiBi": {"alibi": True}, "new decoder": {"new_decoder_architecture": True}},
    "gpt2": {
        "untied": {"tie_word_embeddings": False},
        "padding token": _PAD,
        "untied, padding token": {"tie_word_embeddings": False, **_PAD},
    },
}
_DECODER = "decoder"
#: For what other tasks these are probed on meshes; the page shows them as examples, and the table saves their users the
#: probe's seconds.
_DECODERS = ("llama", "qwen2", "qwen3", "gpt2")
#: Of encoder-decoders one probe each, as language models of two sequences.
_ENCODER_DECODERS = (
    *("t5", "mt5", "umt5", "longt5", "switch_transformers", "bart", "mbart", "plbart", "mvp", "led", "pegasus"),
    *("pegasus_x", "marian", "m2m_100", "nllb-moe", "blenderbot", "blenderbot-small", "prophetnet", "t5gemma"),
)
_SEQ2SEQ = "sequence to sequence"
#: Of images. Those that drop rows at random by default are probed without that, which a mesh has no rule for.
_IMAGES = (
    *("vit", "deit", "beit", "data2vec-vision", "dinov2", "dinov2_with_registers", "dinov3_vit", "vit_msn", "ijepa"),
    *("vit_mae", "clip_vision_model", "siglip_vision_model"),
)
_NO_DROP_PATH = {"drop_path_rate": 0.0}
#: Vision-language models, and what a config that makes one differs in from the defaults.
_IMAGES_WITH_TEXT: dict[str, dict[str, Any]] = {
    # The vocabularies of their checkpoints, in which the token of images is.
    "llava": {"text_config": {"model_type": "llama", "vocab_size": 32064, "pad_token_id": 0}},
    "qwen2_5_vl": {"text_config": {"num_attention_heads": 28, "num_key_value_heads": 4, "rope_parameters": MROPE}},
    **{
        name: {}
        for name in (
            *(
                "gemma3",
                "paligemma",
                "qwen2_vl",
                "qwen3_vl",
                "qwen3_vl_moe",
                "llava_next",
                "llava_onevision",
                "vipllava",
            ),
            *("idefics2", "idefics3", "smolvlm", "internvl", "mistral3", "llama4", "glm4v", "lfm2_vl", "aya_vision"),
            *("deepseek_vl", "aria", "video_llama_3"),
        )
    },
}
#: Models of audio with text, and encoder-decoders of audio.
_AUDIO_WITH_TEXT = ("voxtral", "glmasr")
_SPEECH = ("whisper",)
_ENCODERS = ("bert", "roberta", "xlm-roberta", "distilbert", "electra", "modernbert")
#: By the task's name on the page: transformers' own table of classes, and what a config differs in.
_HEADS: dict[str, tuple[Any, dict[str, Any]]] = {
    "masked language model": (MODEL_FOR_MASKED_LM_MAPPING, {}),
    _SEQ2SEQ: (MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, {}),
    "sequence classification": (MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, {}),
    "regression, rewards": (MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, {"num_labels": 1}),
    "token classification": (MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING, {}),
    "question answering": (MODEL_FOR_QUESTION_ANSWERING_MAPPING, {}),
    "hidden states, pooled": (MODEL_MAPPING, {}),
    "image classification": (MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING, {}),
    "text with images": (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, {}),
    "text with audio": (MODEL_FOR_MULTIMODAL_LM_MAPPING, {}),
    "speech to text": (MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING, {}),
    "masked image modelling": (MODEL_FOR_MASKED_IMAGE_MODELING_MAPPING, {}),
}


def parts() -> dict[str, dict[str, str]]:
    """The page, from the tables as they are."""
    known = _rows()
    return {"architectures.md": {"counts": counts(known), "common": common(known)}}


def files() -> dict[str, str]:
    """All rows, which the site shows as a table."""
    known = _rows()
    return {"data/architectures.csv": comma_separated(list(known[0]), [list(row.values()) for row in known])}


def _rows() -> list[Row]:
    return rows(*(json.loads(path.read_text(encoding="utf-8")) for path in (TABLE, MESH_TABLE)))


def probe(model_types: list[str]) -> None:
    """Probe these architectures again, or all; what the tables have of others stays.

    Each takes a few seconds of a processor. What was found is written down as soon as it is known.
    """
    cases = causal_cases(model_types)
    heads = list(head_cases(model_types))
    with ProcessPoolExecutor(2) as pool:
        for path, find in ((TABLE, probe_pipeline), (MESH_TABLE, _probe_meshes)):
            for case, (key, entry) in zip(cases, pool.map(find, cases), strict=True):
                write_entry(path, case, key, entry)
        for case, (key, entry, staged) in zip(heads, pool.map(_probe_head, heads), strict=True):
            write_entry(MESH_TABLE, case, key, entry, part="heads")
            if staged is not None:
                write_entry(TABLE, case, key, staged, part="heads")
        known = {} if not model_types else certified_files()
        files = [*pool.map(_sources_of, cases), *pool.map(_sources_of_head, heads)]
    write_sources(files, known)


def write_sources(files: Sequence[Mapping[str, str | None]], known: Mapping[str, str]) -> None:
    """Write down with which files of transformers, and which plans of Cuboid's, the tables' entries were found.

    Args:
        files: digests by file, for each case that was probed.
        known: those of cases that weren't probed again.

    Raises:
        ValueError: some of these have other digests now, so that their cases must be probed, too.
    """
    digests = {name: digest for of_case in files for name, digest in of_case.items()}
    # A plan is of one type, all of whose cases are probed together.
    files_of_code = {name: digest for name, digest in digests.items() if not name.startswith("plans/")}
    stale = sorted(name for name, digest in files_of_code.items() if known.get(name, digest) != digest)
    if stale:
        raise ValueError(f"{', '.join(stale)} changed since the other architectures were probed: probe all")
    present = {name: digest for name, digest in {**known, **digests}.items() if digest is not None}
    content = json.dumps(present, indent=1, sort_keys=True)
    SOURCES_TABLE.write_text(content + "\n", encoding="utf-8")


def _sources_of(case: tuple[str, str]) -> Mapping[str, str | None]:
    """Digests of the files whose code a case runs; none if no small model can be made."""
    try:
        cls, config = config_of(*case)
        return _checked_sources(cls, config)
    except Exception:
        return {}


def _sources_of_head(case: tuple[str, str]) -> Mapping[str, str | None]:
    return _checked_sources(*head_of(case))


def _checked_sources(cls: Any, config: PretrainedConfig) -> Mapping[str, str | None]:
    code = code_of(cls, small_for_probe(cls, config))
    # What a process patches must not get into the tables.
    return {**code.files, **plan_digests(config)} if code.is_stock else {}


def head_cases(model_types: Sequence[str] = ()) -> Iterator[tuple[str, str]]:
    """Model types and other tasks that are probed; of all types that are probed for others, if none is named."""
    of_media = (*_IMAGES_WITH_TEXT, *_AUDIO_WITH_TEXT, *_SPEECH)
    for model_type in model_types or (*_DECODERS, *_ENCODERS, *_ENCODER_DECODERS, *_IMAGES, *of_media):
        if model_type in of_media:
            of_audio = "speech to text" if model_type in _SPEECH else "text with audio"
            yield model_type, "text with images" if model_type in _IMAGES_WITH_TEXT else of_audio
        if model_type in _ENCODER_DECODERS:
            yield model_type, _SEQ2SEQ
        if model_type in (*_DECODERS, *_ENCODERS, *_IMAGES):
            config = AutoConfig.for_model(model_type)
            yield from ((model_type, head) for head, (classes, _) in _HEADS.items() if type(config) in classes)


def head_of(case: tuple[str, str]) -> tuple[Any, PretrainedConfig]:
    """The class and a config of an architecture for another task."""
    model_type, head = case
    classes, changes = _HEADS[head]
    changes = {**changes, **_IMAGES_WITH_TEXT.get(model_type, {})}
    config = default_config(model_type, **changes)
    if getattr(config, "drop_path_rate", 0):
        config = AutoConfig.for_model(model_type, **changes, **_NO_DROP_PATH)
    if model_type not in (*_IMAGES, *_IMAGES_WITH_TEXT, *_AUDIO_WITH_TEXT, *_SPEECH) and config.pad_token_id is None:
        # Classifiers of decoders look for the last token that isn't padding.
        config.pad_token_id = 0
    cls = classes[type(config)]
    # Some have a second class for the task, with a head for what is distilled.
    return (cls[0] if isinstance(cls, tuple) else cls), config


def _probe_head(case: tuple[str, str]) -> tuple[str, Any, Any]:
    """Key and entries of an architecture for another task, on a mesh and in stages; None if it can't be cut."""
    torch.set_num_threads(1)
    cls, config = head_of(case)
    try:
        verdict = check_meshes(cls, config)
    except CannotProbe as error:
        verdict = MeshVerdict({"whole rows": str(error)})
    try:
        check_class(cls, stages=True)
        key, staged = entry_of(features_of(cls, config), find_out(cls, config))
    except UnsupportedModelError:
        key, staged = digest_of(features_of(cls, config)), None
    return key, written_verdict(verdict), staged


def write_entry(path: Path, case: tuple[str, str], key: str | None, entry: Any, *, part: str = "flavours") -> None:
    """Put what was found out about an architecture into a table, in place of what was there.

    Args:
        path: of the table.
        case: model type and flavour, or head.
        key: of the architecture's features; None if it was rejected.
        entry: what was found, or the reason.
        part: of the table, that lists flavours or heads.
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    model_type, flavour = case
    names = content.setdefault(part, {}).setdefault(model_type, {})
    content["architectures"].setdefault(model_type, {}).pop(names.pop(flavour, None), None)
    if key is None:
        content["rejected"][model_type] = entry
    else:
        if part == "flavours":
            content["rejected"].pop(model_type, None)
        content["architectures"][model_type][key] = entry
        names[flavour] = key
    in_order = {
        section: {name: entry for name, entry in sorted(entries.items()) if entry}
        for section, entries in content.items()
    }
    path.write_text(json.dumps(in_order, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def causal_cases(model_types: Sequence[str] = ()) -> list[tuple[str, str]]:
    """Model types and flavours of causal language models that are probed; of all types, if none is named."""
    cases = []
    for model_type in model_types or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
        is_of_images = name is not None and name == MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(model_type)
        if name is None or (is_of_images and ImagesWithText.includes(getattr(transformers, name))):
            continue
        cases += [(model_type, flavour) for flavour in ("", *FLAVOURS.get(model_type, {}))]
        # Of the class: not all have defaults that make a config.
        config = CONFIG_MAPPING[model_type]
        if getattr(config, "is_decoder", True) is False and hasattr(config, "add_cross_attention"):
            # An encoder by default, which transformers asks to be made a decoder where it is a causal language model.
            cases.append((model_type, _DECODER))
    return cases


def config_of(model_type: str, flavour: str) -> tuple[Any, PretrainedConfig]:
    """The class and a config of an architecture, with the sizes of transformers' defaults."""
    changes = dict(FLAVOURS.get(model_type, {}).get(flavour, {}))
    if flavour == _DECODER:
        changes["is_decoder"] = True
    config = default_config(model_type, **changes)
    cls = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    config = own_part(config, cls)
    config._attn_implementation = "eager" if flavour.endswith("eager") else config._attn_implementation
    return cls, config


def probe_pipeline(case: tuple[str, str]) -> tuple[str | None, Any]:
    """Key and entry of the table; or no key, and why the architecture can't be cut."""
    torch.set_num_threads(1)
    try:
        cls, config = config_of(*case)
        certificate = find_out(cls, config)
        return entry_of(features_of(cls, config), certificate)
    except UnsupportedModelError as error:
        return None, str(error)
    except Exception as error:
        return None, f"transformers' own defaults make no model: {type(error).__name__}: {error}"


def _probe_meshes(case: tuple[str, str]) -> tuple[str | None, Any]:
    """The same for meshes."""
    torch.set_num_threads(1)
    try:
        cls, config = config_of(*case)
        check_class(cls)
        return digest_of(features_of(cls, config)), written_verdict(check_meshes(cls, config))
    except (UnsupportedModelError, CannotProbe) as error:
        return None, str(error)
    except Exception as error:
        return None, f"transformers' own defaults make no model: {type(error).__name__}: {error}"
