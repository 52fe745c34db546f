"""ablate: what each switch buys, one change at a time, predicted before it is measured."""
