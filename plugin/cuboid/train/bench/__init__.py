"""``cuboid bench``: how fast a user's own model trains with a config, what it sends and what it takes."""
