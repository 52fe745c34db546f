"""Drills: faults injected into small real runs, and whether anything was lost. `seedbed drill` runs them."""
