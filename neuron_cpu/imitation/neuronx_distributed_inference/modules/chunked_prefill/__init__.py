"""Prompts in chunks that several sequences share."""
