"""Starting runs: on this machine, and later on others."""
