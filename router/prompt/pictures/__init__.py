"""What engines make of the pictures of a prompt: identifiers and numbers of tokens."""
