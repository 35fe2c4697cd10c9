"""What would the peers' published formulas choose, given what we know?

One file a peer: a picker whose docstring is the formula with its source and whose fields are the peer's knobs with the
peer's defaults. They run on the same scenes as our own policies, which settles four things for all of them alike:

- Whoever keeps an approximate tree of what it has sent where reads the index here. That favours the peer.
- Load is what we know to be in flight, so that no peer suffers from the lag of a scrape.
- A peer ranks by a score in its own unit; the price in milliseconds stays beside each candidate for comparison.
- Ties fall by lot, drawn from the request's id. Hence every decision replays.

Nothing here remembers anything between two calls, and no shipped policy of ours depends on it.
"""
