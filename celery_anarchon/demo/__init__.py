"""``make demo``: three replicas on one host, of which one is killed, and no server at all."""
