"""Results as a reader sees them: tables on the terminal, JSON and CSV."""
