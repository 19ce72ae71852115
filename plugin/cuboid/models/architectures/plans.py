"""Plans for architectures that have no ``base_model_tp_plan`` of their own, in the same vocabulary.

A plan doesn't decide what is accepted: a small model of the architecture is run on small meshes first
(``models/certification``), and whatever is wrong there is computed whole or rejected.

To add an architecture, give the modules of its layers a style, as ``base_model_tp_plan`` would:

* ``"colwise"``: the input is the block's, and out features are sharded. In attention, shards are whole heads, also if
  query, key and value of each head are adjacent in one weight.
* ``"packed_colwise"``: the same for two projections that are concatenated in one weight; ``"packed_colwise_3"`` for
  three.
* ``"rowwise"``: in features are sharded, and the output is the block's.
* ``"latent"``: the input is the block's, and the output is whole; ``"from_latent"``: the input is whole, and out
  features are sharded into whole heads.

``*`` matches one part of a name. A block with a module that has no style, such as a convolution, is computed whole.
"""

from __future__ import annotations

from typing import Literal

#: Whose features the output of a projection in attention has.
Heads = Literal["query", "key_value", "query_key_value"]

#: Names that many architectures share, by the last part of a module's name or the last two. An architecture's own plan
#: takes precedence.
COMMON: dict[str, str] = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "query_proj", "key_proj", "value_proj"), "colwise"),
    **dict.fromkeys(("query", "key", "value", "query_key_value", "g_proj"), "colwise"),
    **dict.fromkeys(("wi_0", "wi_1"), "colwise"),
    **dict.fromkeys(("gate_proj", "up_proj", "fc1", "fc_in", "c_fc", "dense_h_to_4h", "w1", "w3", "wi"), "colwise"),
    "gate_up_proj": "packed_colwise",
    **dict.fromkeys(("o_proj", "out_proj", "down_proj", "fc2", "fc_out", "dense_4h_to_h", "w2", "wo"), "rowwise"),
    # BERT and its relatives, by the last two parts.
    "intermediate.dense": "colwise",
    "output.dense": "rowwise",
    # T5 and its relatives.
    **{f"{attention}.{name}": "colwise" for attention in ("SelfAttention", "EncDecAttention") for name in "qkv"},
    **dict.fromkeys(("SelfAttention.o", "EncDecAttention.o"), "rowwise"),
}

#: Whose heads a "colwise" projection of attention makes, by the last part of its name; an architecture whose names are
#: others adds them here.
HEADS: dict[str, Heads] = {
    **dict.fromkeys(("q_proj", "query", "query_proj", "q_lin", "q"), "query"),
    **dict.fromkeys(("k_proj", "v_proj", "key", "value", "key_proj", "value_proj", "k_lin", "v_lin"), "key_value"),
    **dict.fromkeys(("k", "v"), "key_value"),
    **dict.fromkeys(("query_key_value", "c_attn", "qkv_proj", "Wqkv"), "query_key_value"),
}

#: Projections of multi-latent attention, by the last part of a module's name; these precede any plan.
LATENT: dict[str, str] = {
    **dict.fromkeys(("q_a_proj", "kv_a_proj_with_mqa"), "latent"),
    **dict.fromkeys(("q_b_proj", "kv_b_proj"), "from_latent"),
}

#: By ``config.model_type``, then by a pattern of the module's name inside the base model.
PLANS: dict[str, dict[str, str]] = {
    "gpt2": {"h.*.attn.c_attn": "packed_colwise_3", "h.*.attn.c_proj": "rowwise", "h.*.mlp.c_proj": "rowwise"},
    "gpt_bigcode": {"h.*.mlp.c_proj": "rowwise"},
    "bloom": {"h.*.self_attention.dense": "rowwise"},
    "falcon": {"h.*.self_attention.dense": "rowwise"},
    "mpt": {"blocks.*.attn.Wqkv": "packed_colwise_3", "blocks.*.ffn.up_proj": "colwise"},
    "gpt_neox_japanese": {"layers.*.attention.dense": "rowwise"},
    "persimmon": {"layers.*.self_attn.dense": "rowwise"},
    "openai-gpt": {"h.*.attn.c_attn": "packed_colwise_3", "h.*.attn.c_proj": "rowwise", "h.*.mlp.c_proj": "rowwise"},
    "distilbert": {
        **dict.fromkeys((f"layer.*.attention.{name}_lin" for name in "qkv"), "colwise"),
        "layer.*.attention.out_lin": "rowwise",
        "layer.*.ffn.lin1": "colwise",
        "layer.*.ffn.lin2": "rowwise",
    },
    "modernbert": {
        "layers.*.attn.Wqkv": "packed_colwise_3",
        "layers.*.attn.Wo": "rowwise",
        "layers.*.mlp.Wi": "packed_colwise",
        "layers.*.mlp.Wo": "rowwise",
    },
}
