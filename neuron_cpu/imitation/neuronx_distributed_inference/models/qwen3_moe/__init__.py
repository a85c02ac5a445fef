"""The baseline Qwen3 with experts."""
