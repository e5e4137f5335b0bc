"""The compiled engine: the same rules under a second driver, for thousands of configurations."""
