"""A fleet under a virtual clock: the router's own decision code in front of pods that only count."""
