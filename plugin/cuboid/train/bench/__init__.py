"""``cuboid bench``: measure the speed, communication and memory of a user's own model with a config."""
