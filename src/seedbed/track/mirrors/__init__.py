"""Mirrors: copies of a run in W&B, TensorBoard, trackio or MLflow, sent from side threads that training never waits for."""
