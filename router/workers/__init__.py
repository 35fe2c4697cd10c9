"""Several worker processes that serve as one router. `README.md` explains the package; one process needs none of it."""
