"""One module for each mode of `main.py`: `run(args)` does it and returns the exit status."""
