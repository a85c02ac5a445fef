"""What a Program computes: execution in PyTorch, merged or one by one, and comparison."""
