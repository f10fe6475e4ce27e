"""Discovery over UDP; the only place that imports kademlia and rpcudp."""
