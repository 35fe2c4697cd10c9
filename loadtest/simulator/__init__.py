"""Whole fleets in virtual time, with the code of the router."""
