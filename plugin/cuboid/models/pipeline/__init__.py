"""The pipeline: the plan of the stages, the cuts of sequences, the schedule of a step, and the step itself."""
