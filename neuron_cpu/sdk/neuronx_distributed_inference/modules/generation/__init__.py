"""Token choice."""
