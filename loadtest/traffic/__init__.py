"""Clients: chats, the driver that sends them, and what they received."""
