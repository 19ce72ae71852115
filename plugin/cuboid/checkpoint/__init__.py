"""The checkpoint format, and how the ranks write and read it together. Depends on torch only, not on any framework.

The nouns are those of torch.distributed.checkpoint. One checkpoint's way through the files:

1. ``save_plan``: each rank lists what it saves, a ``SavePlan`` of ``WriteItem``: tensors that one rank writes together,
   each a ``ShardedTensor`` (``metadata``) of which the rank has a ``ShardRange``. ``optimizer_state`` and ``rng_state``
   give an optimizer's state and the random generators this form.
2. ``saver`` runs a save. One in the background first copies the plan to host memory (``snapshot``).
3. ``save_planner``: the ranks of a stage gather who has which elements; then each of them computes who writes each item
   and into which file.
4. ``exchange``: in rounds, over gloo, each writer gathers the full tensors of one item from the ranks that have them.
5. ``writer``: each rank writes its files, and returns a ``WriteResult``: names, sizes and checksums.
6. ``format.folder``: rank 0 writes the manifest, and renames the finished folder into place.

Loading: ``loader`` finds and verifies a checkpoint (its ``CheckpointMetadata``) and makes a ``LoadPlan`` of each folder
of tensors; ``reader`` gives each rank the elements that it has, so that any layout can load what another one saved, and
reads each byte once for all ranks.

``format`` has the files themselves: their names, the manifest, safetensors, ``state.json``, and the renames that
publish a checkpoint or a model. It knows one process only.

``run_lock`` keeps other runs out of the folder that a run writes its checkpoints to.
"""
