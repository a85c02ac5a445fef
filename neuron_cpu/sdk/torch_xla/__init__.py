"""Stub of torch_xla: contest model files import it, nothing of it computes here."""
