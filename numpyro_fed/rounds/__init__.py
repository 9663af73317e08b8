"""A round between a server and its silos: the contract, silos at hand and remote, bytes and files."""
