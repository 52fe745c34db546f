"""The one place that knows process groups: ranks that train one model together, and parameters cut into pieces."""
