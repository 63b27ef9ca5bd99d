"""What Redis should hold after each act, told by a small model, and what it does hold."""
