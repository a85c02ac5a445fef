"""The baseline Qwen2."""
