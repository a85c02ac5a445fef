"""What bounds a kernel: figures, tables and plots of a schedule."""
