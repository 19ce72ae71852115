"""A step of the pipeline: the plan of the stages, where sequences are cut, and the step itself."""
