"""Text to tokens, on a mesh of any number of chips."""
