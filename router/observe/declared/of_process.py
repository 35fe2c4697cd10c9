"""The router itself: its index and process"""

from __future__ import annotations

from router.observe.fast_metrics import counter, gauge, histogram

LOOP_LAG_S = histogram(
    "warmroute_loop_lag_seconds",
    "Seconds by which the event loop was late for a timer: 100 samples a second, 20 while idle.",
    buckets=(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0),
)
INDEX_BLOCKS = gauge("warmroute_index_block_holders", "Pairs of block and holder in the index.")
DEGRADED_MATCHES = counter("warmroute_degraded_matches", "Prefix matches without an up-to-date cluster index.", "model")
INDEX_AGE_S = gauge("warmroute_index_age_seconds", "Seconds since the replica of the cluster index was up to date.")
INDEX_BYTES = gauge("warmroute_index_bytes", "Bytes of memory of the replica's table.")
INDEX_DROPPED_BLOCKS = counter(
    "warmroute_index_dropped_blocks", "Blocks that did not fit into index.redis.max_replica_bytes."
)
INDEX_READS = counter("warmroute_index_holders_read", "Full reads of a holder's blocks.")
INDEX_HOLDER_COMPLETE = gauge(
    "warmroute_index_holder_complete",
    "1 while no changes of a holder are missing, else 0.",
    "model holder",
)
REPLICAS = gauge("warmroute_other_replicas", "Other routers that registered recently.")
USAGE_LOST = counter("warmroute_usage_lost", "Lines of usage that were dropped because they could not be written.")
RECEIPTS_LOST = counter("warmroute_receipts_lost", "Receipts that were dropped because they could not be written.")
IDENTITY_PROVIDERS_FAILING = gauge(
    "warmroute_identity_providers_failing", "Identity providers whose signing keys could not be fetched the last time."
)

BUILD_INFO = gauge("warmroute_build_info", "1, with the versions of warmroute and Python.", "version python_version")
