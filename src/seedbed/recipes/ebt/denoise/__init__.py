"""Denoising energies over images, and the regressor that they are compared with."""
