"""The transport over HTTP/1.1; the only place that imports aiohttp."""
