"""Parts that the commands share: connection, options, output and errors."""
