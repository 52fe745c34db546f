"""Recordings of frames and controls: the format, importers of captured files, poses and lag estimation."""
