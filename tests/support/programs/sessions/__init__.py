"""Programs of the tests of sessions."""
