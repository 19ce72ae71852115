"""A model on a mesh: how its parameters are sharded, its layers replaced, and its forward kept as users know it."""
