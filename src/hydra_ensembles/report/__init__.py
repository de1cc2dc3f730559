"""Figures and pages of plain results."""
