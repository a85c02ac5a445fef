"""Changes that the vendor's compiler makes to a kernel, one module each."""
