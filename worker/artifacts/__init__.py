"""What a task makes and keeps besides its result: content-addressed, in a folder or an object store."""
