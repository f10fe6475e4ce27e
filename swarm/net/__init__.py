"""The network: the only place that imports aiohttp or kademlia, and the in-memory twins of both."""
