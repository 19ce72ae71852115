"""What each module of an architecture is for, which tasks are supported, and what an architecture was certified for."""
