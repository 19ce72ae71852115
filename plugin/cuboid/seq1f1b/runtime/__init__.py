"""Running one rank's program of a schedule: computation, p2p messages, measured times and bytes."""
