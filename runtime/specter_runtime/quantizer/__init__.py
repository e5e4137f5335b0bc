"""Codes of a draft's routed experts: symmetric integers and the base code of coded experts."""

from specter_runtime.quantizer.draft import DraftCode, parse

__all__ = ["DraftCode", "parse"]
