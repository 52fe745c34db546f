"""Drills: faults injected into small real runs, to test that nothing is lost. Run by `seedbed drill`."""
