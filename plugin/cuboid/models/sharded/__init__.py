"""A model on a mesh: the plan of how parameters are sharded, the replacement of layers, and the forward."""
