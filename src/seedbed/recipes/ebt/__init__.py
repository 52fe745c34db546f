"""ebt: an energy-based transformer that predicts by walking downhill on a score, and can be asked to walk further."""
