"""How do several workers serve as one router?

`bus.py` carries bytes between them, `view.py` says which: what one worker does, the others know about a millisecond
later. A router of one process has none of it.
"""
