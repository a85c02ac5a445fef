"""Names of EAGLE speculation that model files import."""
