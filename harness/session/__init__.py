"""The model at work: configured, compiled, loaded, generating."""
