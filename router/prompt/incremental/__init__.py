"""An optional shortcut for growing chats: only the new messages are rendered, encoded and hashed.

`reader.py` does without the template where messages have only roles and texts; `short_chats.py` renders the end of
any other chat.

`IncrementalReader` is the only entrance and `fingerprint.py` its only user. `index.incremental_prompts: false` turns it
off; every prompt is then read whole, with the same result. A reader who is new to the project can skip this package.
"""
