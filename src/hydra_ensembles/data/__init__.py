"""Data: loaders, corruptions, OOD proxies, the embedded demo set."""
