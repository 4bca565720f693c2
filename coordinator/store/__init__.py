"""Where the coordinator keeps what it knows: facts in a database, bodies and weights in a directory."""
