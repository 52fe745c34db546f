"""Data: stores on disk, the order of items, the feed to the device, and text sources."""
