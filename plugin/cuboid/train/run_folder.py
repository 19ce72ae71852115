"""Names in the folder of a run, beside those of its report and its metrics."""

#: The trained model, the blocks of the held-out loss, and the trace of a pipeline's step.
MODEL, BLOCKS, TRACE = "model", "heldout_blocks.npy", "trace"
#: Is there while a run writes its model and report: if it is there later, the run was killed meanwhile.
WRITING = ".result.incomplete"
#: Folder of the checkpoints from which a run can be resumed.
CHECKPOINTS = "checkpoints"
