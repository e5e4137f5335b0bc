"""Many configurations: the axes that name them, computing them, and keeping their results."""
