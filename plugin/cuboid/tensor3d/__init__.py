"""3-D tensor parallelism (Bian et al., arXiv 2105.14450): transformer layers on a batch × sequence × hidden mesh.

A training step through this folder, for one linear layer:

1. At load time a layer of the model is replaced by a sharded one (``layers/linear.py``). Each of its parameters has a
   ``ShardingSpec`` (``sharding/sharding_spec.py``: which rank owns which elements) and a ``ShardedParam``.
2. Before a decoder layer runs, ``prefetch.py`` has unsharded its weights while the layer in front of it computed
   (``sharding/sharded_param.py``; small parameters share all-gathers: ``param_group.py`` and ``bucketing.py``).
3. ``layers/fused_projections.py`` all-gathers the block's input once and runs q, k, v (or gate and up) as one
   ``LinearOp`` (``layers/linear_op.py``: the table of shapes, and the equations of forward and backward).
4. Its forward is an input gather (``layers/input_gather.py``), and matrix products straight into the buffer of an
   output reduce (``layers/output_reduce.py``).
5. Its backward is the transpose of that. It starts the reduce-scatter of dW, which is waited for only after the
   backward of the preceding layer (``sharding/deferred_reduce.py``).
6. ``layers/vocab_cross_entropy.py`` computes the loss on logits that stay sharded over the vocabulary.

A mixture of experts (``experts/``) routes each rank's own tokens (``router.py``), sorts the tokens by expert
(``dispatch.py``), and runs the "up" and "down" products on each expert's rows (``grouped_linear.py``).

Forwards without a graph that have few tokens, as the steps of a generation, are computed in ``decoding/``.
"""
