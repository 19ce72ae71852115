"""Runs one rank's program of a schedule: computation and p2p messages; measures times and memory."""
