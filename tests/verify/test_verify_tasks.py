"""`cuboid verify` of checkpoints that are for other things than causal language modelling, as their configs say."""

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from transformers import AutoConfig
from typer.testing import CliRunner

from cuboid import CuboidError
from cuboid.cli import commands
from cuboid.distributed.thread_ranks import ThreadRanks
from cuboid.distributed.topology import MeshShape
from cuboid.errors import UnsupportedModelError
from cuboid.models.certification.small_config import small_config
from cuboid.verify import Plan, SmallModel, verify
from cuboid.verify.masks import compare_masks, mask_correlation, probe_masks
from cuboid.verify.run import complete

TIMEOUT_S = 120
TEXT = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96,
        "vocab_size": 131, "max_position_embeddings": 64}  # fmt: skip
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 131, "n_positions": 64, "pad_token_id": 0}
DISTIL = {"dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 96, "vocab_size": 131, "max_position_embeddings": 64}
T5 = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "vocab_size": 131}
MODERN = {**TEXT, "global_attn_every_n_layers": 2, "local_attention": 16, "pad_token_id": 0, "bos_token_id": 1,
          "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}  # fmt: skip
#: By class: the model type, and what its config says. Dropout stays as it is by default, and must be left out.
MODELS = {
    "BertForMaskedLM": ("bert", TEXT),
    "BertForSequenceClassification": ("bert", {**TEXT, "num_labels": 3}),
    "BertModel": ("bert", TEXT),
    "RobertaForQuestionAnswering": ("roberta", {**TEXT, "max_position_embeddings": 66, "pad_token_id": 1}),
    "DistilBertForTokenClassification": ("distilbert", {**DISTIL, "num_labels": 5}),
    "GPT2ForSequenceClassification": ("gpt2", {**GPT2, "num_labels": 1}),
    "T5ForConditionalGeneration": ("t5", {**T5, "decoder_start_token_id": 0}),
    "BartForConditionalGeneration": ("bart", {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96,
        "vocab_size": 131, "max_position_embeddings": 64}),
    "ModernBertForMaskedLM": ("modernbert", MODERN),
    "OPTForCausalLM": ("opt", {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 96,
        "vocab_size": 131, "max_position_embeddings": 64, "word_embed_proj_dim": 64, "pad_token_id": 1}),
    "MarianMTModel": ("marian", None),
    "Mamba2ForCausalLM": ("mamba2", None),
    "FalconH1ForCausalLM": ("falcon_h1", None),
    "BioGptForCausalLM": ("biogpt", None),
    "BartForCausalLM": ("bart", None),
    "TrOCRForCausalLM": ("trocr", None),
    "PhiForCausalLM": ("phi", None),
    "Gemma2ForTokenClassification": ("gemma2", None),
    "XGLMForCausalLM": ("xglm", None),
    "MllamaForCausalLM": ("mllama_text_model", None),
    "ViTForImageClassification": ("vit", {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 96, "image_size": 32, "patch_size": 8}),
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Writes the checkpoint of a class once; returns its path."""
    written = {}

    def path_of(name):
        if name not in written:
            model_type, settings = MODELS[name]
            torch.manual_seed(0)
            written[name] = tmp_path_factory.mktemp(name)
            config = small_config(AutoConfig.for_model(model_type)) if settings is None else None
            config = config or AutoConfig.for_model(model_type, **settings)
            getattr(transformers, name)(config).save_pretrained(written[name])
        return str(written[name])

    return path_of


def config_of(mesh=None, **pipeline):
    names = ("batch", "sequence", "hidden")
    axes = {} if mesh is None else dict(zip(names, map(int, mesh.split("x")), strict=True))
    config = {"zero_optimization": {"stage": 1}}
    config |= {"tensor_parallel": {"mode": "3d_tensor", "mesh": axes}} if axes else {}
    return config | ({"pipeline": {"engine": "seq1f1b", **pipeline}} if pipeline else {})


CASES = [
    ("BertForSequenceClassification", config_of("2x2x1")),
    ("T5ForConditionalGeneration", config_of("1x2x1")),
    ("BertForMaskedLM", config_of("1x1x2")),
    ("BertModel", config_of("2x2x1")),
    ("RobertaForQuestionAnswering", config_of("1x2x2")),
    ("DistilBertForTokenClassification", config_of("2x1x2")),
    ("GPT2ForSequenceClassification", config_of("1x2x1")),
    ("BartForConditionalGeneration", config_of("2x2x2")),
    ("ModernBertForMaskedLM", config_of(stages=2, segments=1)),
    ("BertForSequenceClassification", config_of(stages=2, segments=1)),
    ("RobertaForQuestionAnswering", config_of(stages=2, segments=1, schedule="zero_bubble")),
    ("DistilBertForTokenClassification", config_of(stages=2, segments=1, schedule="1f1b")),
    ("GPT2ForSequenceClassification", config_of(stages=2, segments=1)),
    ("RobertaForQuestionAnswering", config_of("1x2x1", stages=2, segments=1)),
    ("BertForMaskedLM", config_of("2x1x2", stages=2, segments=1)),
    ("OPTForCausalLM", config_of("1x2x1")),
    # Leaves tables of positions out of its checkpoints.
    ("MarianMTModel", config_of("1x2x1")),
    # Keeps the residual stream in float32.
    ("Mamba2ForCausalLM", config_of(stages=2, segments=3)),
    # Makes a buffer of all layers in one place.
    ("FalconH1ForCausalLM", config_of(stages=2, segments=1)),
    ("BioGptForCausalLM", config_of(stages=2, segments=3)),
    # Their own loss compares positions with their own labels.
    ("BartForCausalLM", config_of(stages=2, segments=1)),
    ("TrOCRForCausalLM", config_of(stages=2, segments=1)),
    # Calls one dropout twice in a layer.
    ("PhiForCausalLM", config_of(stages=2, segments=3)),
    ("ViTForImageClassification", config_of("2x2x1")),
    # Its head has a dropout that its config doesn't tell.
    ("Gemma2ForTokenClassification", config_of("1x2x1")),
]
LEFT_OUT = {"OPTForCausalLM": "padding on the left", "BioGptForCausalLM": "packed sequences"}


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "config"), CASES, ids=[name for name, _ in CASES])
def test_a_checkpoint_is_compared_as_what_it_is_for(pool, saved, name, config):
    plan = Plan(saved(name), batch=4, accumulate=2, data_parallel=1)
    report = verify(plan, config, passes=("core",), pool=pool, timeout_s=TIMEOUT_S)
    (core,) = report.passes
    assert report.passed, core.first_difference
    kinds = {check.kind for check in core.checks}
    assert kinds >= {"loss", "gradient", "norm", "weight", "logits" if "Image" in name else "activation"}
    if name in LEFT_OUT:
        assert [kind for kind, _ in core.plan.left_out] == [LEFT_OUT[name]]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["BertForMaskedLM", "BertForSequenceClassification", "T5ForConditionalGeneration"])
def test_the_engine_is_compared_too(saved, name):
    plan = Plan(saved(name), batch=4, accumulate=2, data_parallel=2)
    report = verify(plan, config_of("1x1x2"), timeout_s=TIMEOUT_S)
    assert report.passed, [compared.first_difference for compared in report.passes]


def test_a_model_of_images_whose_config_has_no_size_of_its_own_is_refused_in_a_sentence(tmp_path):
    SmallModel("segformer").write(tmp_path)
    with pytest.raises(UnsupportedModelError, match="its config has no image_size of a height and a width"):
        complete(Plan(str(tmp_path)), None, has_mesh=True)


def test_what_plain_transformers_cannot_run_or_load_is_said_in_a_sentence(saved):
    with pytest.raises(
        CuboidError, match=r"XGLMForCausalLM fails in plain transformers, in float64: .*--dtype float32"
    ):
        verify(Plan(saved("XGLMForCausalLM"), batch=4), config_of("1x2x1"), passes=("core",), timeout_s=TIMEOUT_S)
    with pytest.raises(UnsupportedModelError, match="has no model for the model_type 'mllama_text_model'"):
        complete(Plan(saved("MllamaForCausalLM")), None)


#: By name: the class that `--arch` makes, a layout of two ranks, and what is said if it can't be compared.
NAMED = {
    "gpt_oss": ("GptOssForCausalLM", "--mesh 1x1x2", None),
    "glm4": ("Glm4ForCausalLM", "--stages 2", None),
    "smollm3": ("SmolLM3ForCausalLM", "--mesh 1x2x1", None),
    "olmoe": ("OlmoeForCausalLM", "--mesh 1x2x1", None),
    "qwen3_next": ("Qwen3NextForCausalLM", "--mesh 1x2x1", None),
    "phi3": ("Phi3ForCausalLM", "--stages 2 --layers 5", None),
    "bert": ("BertForMaskedLM", "--mesh 1x1x2", None),
    "t5": ("T5ForConditionalGeneration", "--mesh 2x1x1", None),
    "BertForTokenClassification": ("BertForTokenClassification", "--stages 2 --segments 1", None),
    "vit": ("ViTForImageClassification", "--mesh 1x1x2", None),
    "vit_msn": ("ViTMSNForImageClassification", "--stages 2", "is for image classification; a pipeline has rules for"),
}


@pytest.mark.sample(0, ci=2)
@pytest.mark.parametrize("name", NAMED)
def test_the_command_makes_a_small_model_of_any_type(name):
    _, layout, reason = NAMED[name]
    result = CliRunner().invoke(commands, ["verify", "--arch", name, *layout.split(), "--no-engine"])
    if reason is None:
        assert (result.exit_code, "checks pass" in result.stdout) == (0, True), result.stdout + str(result.exception)
    else:
        assert isinstance(result.exception, CuboidError)
        assert reason in str(result.exception)


@pytest.mark.parametrize("name", NAMED)
def test_a_small_model_is_of_the_class_that_its_type_is_for(name, tmp_path):
    SmallModel(name).write(tmp_path)
    cls = NAMED[name][0]
    assert type(Plan(str(tmp_path)).empty_model()).__name__ == cls
    weights = [x for x in load_file(tmp_path / "model.safetensors").values() if x.dim() == 1 and len(x) > 1]
    # Neither norms of one nor biases of zero, behind which mistakes would hide.
    assert all(len(x.unique()) > 1 for x in weights)


def test_small_models_of_other_types_have_all_kinds_of_layers_and_at_least_so_many():
    assert SmallModel("smollm3", layers=5).config().num_hidden_layers == 5
    for least, layers in ((1, 4), (7, 7)):
        kinds = SmallModel("qwen3_next", layers=least).config().layer_types
        assert (len(kinds), set(kinds)) == (layers, {"linear_attention", "full_attention"})
    with pytest.raises(CuboidError, match="layers is 33; bert has 12 by default"):
        SmallModel("bert", layers=33).config()


@pytest.mark.parametrize(
    ("name", "options", "settings"),
    [
        ("gpt_oss", {"heads": 8, "kv_heads": 4, "vocabulary": 67},
         {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 128, "vocab_size": 67}),
        ("bert", {"heads": 6, "vocabulary": 67}, {"num_attention_heads": 6, "hidden_size": 96, "vocab_size": 67}),
        ("t5", {"heads": 8, "head_dim": 4}, {"num_heads": 8, "d_model": 32, "d_kv": 4}),
        ("olmoe", {"bias": True, "router_loss": 0.2},
         {"attention_bias": True, "output_router_logits": True, "router_aux_loss_coef": 0.2}),
        ("glm4", {"tied": True}, {"tie_word_embeddings": True}),
        ("starcoder2", {"sliding_window": 40, "pad_token": 5}, {"sliding_window": 40, "pad_token_id": 5}),
        # Has windows only if another key says so.
        ("qwen2_moe", {"sliding_window": 9},
         {"sliding_window": 9, "use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"] * 2}),
        ("mixtral", {"rope": "longrope"}, {"head_dim": 8, "num_local_experts": 4}),
    ],
)  # fmt: skip
def test_sizes_and_options_of_any_type_can_be_chosen(name, options, settings):
    for small in (SmallModel(name, **options), SmallModel.fitting(name, 2, **options)):
        config = small.config().to_dict()
        assert {key: config[key] for key in settings} == settings


def test_scaled_rotary_embeddings_of_other_types_keep_what_else_they_have():
    rope = SmallModel("glm4", rope="dynamic").config().rope_parameters
    assert rope == {"rope_type": "dynamic", "factor": 4.0, "partial_rotary_factor": 0.5, "rope_theta": 10000.0}


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("mamba", {"heads": 8}, "heads is 8; the config of mamba has no such setting, as others have num_attention"),
        ("bert", {"kv_heads": 2}, "kv_heads is 2; the config of bert has no such setting"),
        ("bert", {"rope": "yarn"}, "rope is 'yarn'; the config of bert has no such setting, as others have rope_type"),
        ("t5", {"bias": True}, "bias is True; the config of t5 has no such setting"),
        ("vit", {"vocabulary": 9}, "vocabulary is 9; the config of vit has no such setting"),
        # One for each kind of layer.
        ("gemma3_text", {"rope": "yarn"}, "rope is 'yarn'; the config of gemma3_text has no such setting"),
        ("llama", {"sliding_window": 8}, "sliding_window is 8; the config of llama has no such setting"),
        ("deepseek_v3", {"kv_heads": 2}, "kv_heads is 2; the config of deepseek_v3 has no such setting"),
        ("gpt_oss", {"heads": 3, "kv_heads": 2}, "kv_heads is 2, which doesn't divide heads = 3"),
    ],
)
def test_options_that_a_type_does_not_have_are_refused_by_name(name, options, reason):
    with pytest.raises(CuboidError, match=reason):
        SmallModel.fitting(name, 2, **options)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gpt_os", "'gpt_os' is no model type and no model's class in transformers .*did you mean 'gpt_oss' or "),
        ("wav2vec2", "Wav2Vec2Model is given input_values"),
        ("rag", "transformers has no model of 'rag' for which there are rules"),
        ("BertForPreTraining", "BertForPreTraining is for several objectives of pretraining"),
        ("GPT2DoubleHeadsModel", "AutoModel makes no GPT2DoubleHeadsModel of its config"),
        ("luke", "luke: a small one has 128,[0-9,]+ parameters, for some of whose sizes no key is known"),
        ("flaubert", "AutoModelForCausalLM makes no FlaubertWithLMHeadModel of its config"),
    ],
)
def test_names_without_a_small_model_are_refused_in_a_sentence(name, reason, tmp_path):
    with pytest.raises(UnsupportedModelError, match=reason):
        SmallModel(name).write(tmp_path)


def test_no_dropout_is_left(saved):
    plan = Plan(saved("BertForSequenceClassification"))
    assert plan.model_config().hidden_dropout_prob == plan.model_config().attention_probs_dropout_prob == 0
    assert not any(module.p for module in plan.empty_model().modules() if isinstance(module, torch.nn.Dropout))


def test_what_ranks_compute_alike_they_have_to_drop_alike():
    torch.manual_seed(0)
    one, other = torch.rand(2, 4000) < 0.5
    assert mask_correlation([one, other], [0, 1])[0] < mask_correlation([one, other], [0, 1])[1]
    assert mask_correlation([one, one], [0, 1])[0] == 1
    assert mask_correlation([one, one, other, other], [0, 0, 1, 1])[0] < 0.1
    assert mask_correlation([one, other], [0, 0]) == (float("inf"), 0.0)


def test_zeros_in_front_of_a_dropout_are_not_taken_for_dropped():
    model = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Dropout(0.1))
    (mask,) = probe_masks(model.named_modules(), model, lambda: model(-torch.ones(4000)))["1"].calls
    assert 0.45 < mask.double().mean() < 0.55


def test_ranks_with_the_same_padding_but_other_tokens_were_not_given_the_same():
    dropout = torch.nn.Sequential(torch.nn.Dropout(0.1))
    inputs = torch.zeros(2, 3, 8, 64)
    inputs[:, :, 5:] = torch.randn(2, 3, 3, 64)
    one, other = (probe_masks(dropout.named_modules(), dropout, lambda x=x: dropout(x))["0"] for x in inputs)
    assert not torch.equal(one.inputs[0], other.inputs[0])


class Functional(torch.nn.Module):
    """Drops out twice by a function, at a rate that it has itself, as BART's layers do; perhaps alike each time."""

    def __init__(self, seeds):
        super().__init__()
        self.dropout, self.seeds = 0.1, seeds
        self.scale = torch.nn.Parameter(torch.ones(4000))

    def forward(self, x):
        for _ in range(2):
            if self.seeds:
                torch.manual_seed(self.seeds.pop(0))
            x = torch.nn.functional.dropout(x * self.scale, self.dropout, self.training)
        return x


def masks_alike(seeds, again=()):
    """Which masks of two calls are alike, and which masks of a recomputation aren't those of its forward."""
    model, checkpointed = Functional(list(seeds)), Functional(list(again))

    def backward():
        x = torch.ones(4000, requires_grad=True)
        checkpoint(checkpointed, x, use_reentrant=False, preserve_rng_state=not again).sum().backward()

    def modules(of):
        return [("layer", of)]

    calls = probe_masks(
        modules(model), torch.nn.ModuleDict({"layer": model}), lambda: [model(torch.ones(4000)) for _ in range(2)]
    )
    with set_checkpoint_early_stop(False):
        repeated = probe_masks(modules(checkpointed), torch.nn.ModuleDict({"layer": checkpointed}), backward)
    (mesh,) = ThreadRanks(MeshShape(1, 1, 1)).meshes
    differences = compare_masks(calls, repeated, mesh)
    assert {name.partition(", masks")[0] for name in differences} == {"layer, its dropout 0", "layer, its dropout 1"}
    return {name.rpartition(" ")[2] for name, (error, largest) in differences.items() if error > largest}


def test_masks_of_functions_are_compared_between_calls_and_with_their_recomputation():
    assert masks_alike(seeds=()) == set()
    assert masks_alike(seeds=(1, 2, 1, 3)) == {"layers"}
    assert masks_alike(seeds=(1, 2, 3, 4), again=(1, 2, 1, 3)) == {"recomputation"}
    assert masks_alike(seeds=(1, 2, 3, 4), again=(1, 2, 1, 2)) == set()
