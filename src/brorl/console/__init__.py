"""What a person sees in the terminal while a command works, and when it is done."""
