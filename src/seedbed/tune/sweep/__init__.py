"""Sweeps: many runs of one recipe over a grid of settings or suggested ones, shared between processes."""
