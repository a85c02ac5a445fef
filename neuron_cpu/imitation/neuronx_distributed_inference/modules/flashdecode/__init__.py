"""Flash decoding."""
