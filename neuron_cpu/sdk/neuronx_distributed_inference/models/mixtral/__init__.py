"""The baseline Mixtral."""
