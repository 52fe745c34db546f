"""Mirrors: copies of a run in W&B, TensorBoard, trackio or MLflow, sent from background threads that training never waits for."""

# The file in a run's folder that lists its mirrors; a run without it loads nothing of this package.
MEMORY = "mirrors.json"
