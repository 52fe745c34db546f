"""The loop and all it needs: engine, optimizers, schedules, checkpoints, guards, capture. Knows no recipe."""
