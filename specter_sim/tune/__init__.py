"""Choose a whole system for a memory budget: what to draft, evict, prefetch, code, and keep where.

Every alternative is simulated at equal device bytes on one half of the trace's sequences; what is
reported was measured on the other half.
"""
