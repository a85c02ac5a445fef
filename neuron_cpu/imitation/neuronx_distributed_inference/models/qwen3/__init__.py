"""The baseline Qwen3."""
