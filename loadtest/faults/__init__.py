"""What must not hurt good clients: attacks, killed parts, incidents, updates, long runs, long callbacks."""
