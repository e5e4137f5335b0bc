"""Predict how fast a Mixture-of-Experts model larger than GPU memory will decode on given hardware.

The package never imports torch, not even indirectly.
"""

__version__ = "0.1.0"
