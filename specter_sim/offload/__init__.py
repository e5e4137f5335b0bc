"""The schedule without a clock: offloader, decode loop, ports, journal."""
