"""ebt: energy-based transformers, which predict by gradient descent on an energy."""
