"""Coded experts: exact weights as a draft's base and the refinement that it leaves open."""

from specter_runtime.codec.codec import Coded, encode, expand_into, stream_checksum
from specter_runtime.codec.coding import BaseName, Coding

__all__ = ["BaseName", "Coded", "Coding", "encode", "expand_into", "stream_checksum"]
