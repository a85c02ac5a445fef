"""The baseline Mistral."""
