"""Level 3: blocks of models."""
