"""Traces of shapes nobody recorded, made to resemble one that somebody did.

A synthetic router scores every expert at every position; the K best are its route. Scores are
Gaussian: a constant per expert (its popularity) plus processes that remember for a little or a
long time (locality). The draft and the gate see the same score through noise. How strongly two
scores must correlate for their routes to share a given number of experts is measured once per
layer (`RouteCurve`) and inverted, so each statistic of the source sets one parameter:

- popularity by rank -> the constants,
- overlap by lag -> the mixture of memories,
- draft recall, for accepted and rejected proposals apart -> the draft's noise,
- recall of the gate one layer early -> the gate's noise,
- agreement and acceptance probabilities -> copied from the source in blocks, order kept.

Between shapes, overlap is carried over as the share of the way from uniform routing to full
overlap. Tokens carry no meaning in a synthetic trace, and layers are independent.
"""

from specter_traces.synthesize.assumed import with_assumed_draft
from specter_traces.synthesize.whole import synthesize

__all__ = ["synthesize", "with_assumed_draft"]
