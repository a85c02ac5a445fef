"""Checks of all inputs: the command line, prompts, model folders, the submission."""
