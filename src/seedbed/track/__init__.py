"""What a run writes: its folder, rows, events, console and code state. Does not import torch."""
