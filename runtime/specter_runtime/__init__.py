"""Real inference of mixture-of-experts models: checkpoints, drafts, trace capture.

Importing this package loads nothing heavy; its modules import torch when they are imported.
"""
