"""The user's config: Cuboid's own sections, the framework's part, and whether the two are compatible."""
