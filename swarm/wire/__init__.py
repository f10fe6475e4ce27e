"""What crosses the network: messages, framing, tensor payloads and signed records. No sockets here."""
