"""Runs of one shape trained as one stacked model."""
