"""`perdure demo`: the whole story on real input, an audit of Python code that survives its workers."""
