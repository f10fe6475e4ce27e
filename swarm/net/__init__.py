"""The network: the only place that knows sockets, HTTP and kademlia, and the in-memory twins of both."""
