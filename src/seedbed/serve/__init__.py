"""The web workbench: runs, comparisons, sweeps, the journal and a playground as pages on this machine."""
