"""gpt: a decoder-only language model on characters or byte-level BPE, from a laptop to one fast GPU."""
