"""ablate: the effect of each setting, one change at a time, predicted before it is measured."""
