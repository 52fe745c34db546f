"""Checks: properties of a healthy run, tested on the real recipe before training."""
