"""The schedule lane: what a step reads, and when. Poison, delayed and skewed ranks, replays, messages, prefetch, launch-graph races."""
