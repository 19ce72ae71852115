"""The user's config: Cuboid's own sections, the framework's part of it, and whether the two go together."""
