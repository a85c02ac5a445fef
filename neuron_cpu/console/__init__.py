"""What a command line takes, and what the terminal says."""
