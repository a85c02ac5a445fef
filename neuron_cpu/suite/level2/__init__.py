"""Level 2: operators to be fused."""
