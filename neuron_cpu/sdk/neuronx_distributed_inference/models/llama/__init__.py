"""The baseline Llama."""
