"""Ship an ensemble: programs that run without torch (`exporting.py`), and the service over HTTP.

Nothing is imported here: the service also runs where torch is not installed.
"""
