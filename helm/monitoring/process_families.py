"""The process: families of `prometheus_client`"""

from __future__ import annotations

from router.observe.fast_metrics import counter, gauge

CPU_S = counter("process_cpu_seconds", "Total user and system CPU time spent in seconds.")
RESIDENT_BYTES = gauge("process_resident_memory_bytes", "Resident memory size in bytes.")
VIRTUAL_BYTES = gauge("process_virtual_memory_bytes", "Virtual memory size in bytes.")
START_TIME_S = gauge("process_start_time_seconds", "Start time of the process since unix epoch in seconds.")
OPEN_FDS = gauge("process_open_fds", "Number of open file descriptors.")
MAX_FDS = gauge("process_max_fds", "Maximum number of open file descriptors.")
