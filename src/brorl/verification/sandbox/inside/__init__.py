"""Code that runs in the sandbox's processes: it imports only the standard library and `values`."""
