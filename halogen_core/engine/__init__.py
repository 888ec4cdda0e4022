"""The engine: batches, steps, sampling, the worker process and its client."""
