"""Instruments that measure a recipe before a run: find-lr, find-batch, profile, plan, ablate and sweep."""
