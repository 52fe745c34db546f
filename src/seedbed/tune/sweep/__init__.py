"""Sweeps: many runs of one recipe over a grid of settings or over suggested ones, shared between processes."""
