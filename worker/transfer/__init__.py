"""Transfer of a task to another deployment, in a file of JSON lines.

| module | what it holds |
|---|---|
| `export` | writes a task that does not run, and closes it |
| `import_` | checks a file, and stores its task |
"""
