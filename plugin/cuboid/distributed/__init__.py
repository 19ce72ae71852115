"""The mesh of ranks and what runs on it: process groups, collectives, counted bytes, and how ranks fail together."""
