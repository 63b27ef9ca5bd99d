"""A model of the content of Redis after each act, compared with the server."""
