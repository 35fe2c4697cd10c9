"""Reads the bodies of other APIs as chats. Engines convert them before they render them, each in its own way.

`conversion.py` is the interface, one file an engine has the rules, and `engines/` names them for each endpoint.
"""
