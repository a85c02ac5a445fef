"""What goes in, checked at the door: the command line, prompts, model folders, the submission."""
