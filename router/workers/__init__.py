"""Several worker processes that serve as one router. `README.md` explains the package; one process needs none of it."""

from router.workers.supervisor import bind_port, supervise_workers
from router.workers.worker_sync import WorkerIdentity, WorkerSync

__all__ = ["WorkerIdentity", "WorkerSync", "bind_port", "supervise_workers"]
