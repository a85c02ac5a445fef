"""What bounds a kernel: figures, tables and traces of a schedule."""
