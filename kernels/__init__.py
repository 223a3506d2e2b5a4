"""Arrays to arrays: what every expression of the language computes, plainly and fast."""
