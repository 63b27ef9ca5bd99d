"""Messages as somebody would post them who means harm, or whose memory is broken."""
