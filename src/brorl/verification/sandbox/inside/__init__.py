"""Code that runs in the processes of the sandbox: it imports the standard library and `values` alone."""
