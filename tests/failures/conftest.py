"""The fixture that two modules share."""

from two_hosts import two_hosts

__all__ = ["two_hosts"]
