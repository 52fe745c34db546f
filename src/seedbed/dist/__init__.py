"""Distributed training: the only package that uses process groups and sharded parameters."""
