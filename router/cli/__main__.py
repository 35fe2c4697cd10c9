"""`python -m router.cli`, which is `warmroute`."""

from router.cli import main

main()
