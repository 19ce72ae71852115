"""Schedules as data: built, validated, lowered to messages, simulated and drawn. Nothing here runs a model."""
