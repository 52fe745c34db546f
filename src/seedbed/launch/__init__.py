"""Starts runs on this machine and as Slurm jobs."""
