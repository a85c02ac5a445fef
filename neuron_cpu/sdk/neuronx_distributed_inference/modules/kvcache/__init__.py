"""The key-value cache."""
