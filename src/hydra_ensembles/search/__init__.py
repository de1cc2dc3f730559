"""Circuits: which heads to keep for an objective, and which members complement each other."""
