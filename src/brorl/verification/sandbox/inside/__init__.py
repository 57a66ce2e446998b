"""Code that runs in the processes of the sandbox: it imports only the standard library and `values`."""
