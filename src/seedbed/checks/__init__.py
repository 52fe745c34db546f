"""Checks: properties that a healthy run has, tested on the real recipe before it is trained."""
