"""Ship an ensemble: programs that run without torch (`exporting.py`), the service over HTTP, and
bulk prediction of Parquet files (`bulk.py`).

Nothing is imported here: the service also runs where torch is not installed.
"""
