"""Package path of a private compiler module; only its leaf holds a name."""
