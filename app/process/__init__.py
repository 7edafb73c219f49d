"""The processes of a server and what the system says of them: guardian, sweep, interpreters, /proc and GPU."""
