"""Arguments of command lines, and output to the terminal."""
