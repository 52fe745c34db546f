"""Instruments that answer before a run is paid for: find-lr, find-batch, profile and plan, for any recipe."""
