"""Ensembles of pruned attention heads from one pretrained transformer."""
